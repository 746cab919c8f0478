"""Where checkpoints lie: a local folder, or any place that fsspec reaches by a URL with a scheme.

A checkpoint becomes visible whole or not at all. Local folders are renamed into place; an object store has no rename,
so there a folder counts from the moment its manifest, written last, is in it.
"""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from shardkit.errors import CheckpointError

MANIFEST = "manifest.json"
STAGING = ".tmp-"
# Of folders that are being written, invisible to readers.
REPLACED = ".old-"
# Of a checkpoint whose successor of the same name is being put in its place.


class Storage(Protocol):
    """A folder of checkpoints; paths are relative to it."""

    root: str

    @abstractmethod
    def names(self, path: str = "") -> list[str]:
        """What is in the folder `path`; nothing when it is not there."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file.

        Raises:
            OSError: it is not there.
        """
        ...

    @abstractmethod
    def make(self, path: str) -> None:
        """Make the folder `path`, and those above it."""

    @abstractmethod
    def create(self, path: str) -> Any:
        """Context of a new binary file; what was written is durable when it ends without an error."""

    @abstractmethod
    def read_into(self, path: str, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of `path` from `offset` on.

        Raises:
            CheckpointError: the file ends before.
            OSError: it cannot be read.
        """

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a small file, replacing one of that name at once."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file or a folder with all in it, if it is there."""

    @abstractmethod
    def staging(self, name: str, token: str) -> str:
        """The folder in which the checkpoint `name` is written."""
        ...

    @abstractmethod
    def publish(self, staging: str, name: str) -> None:
        """Make what was written in `staging` the checkpoint `name`, durably, in the place of one of that name."""

    @abstractmethod
    def clean(self) -> list[str]:
        """Remove what writers that were killed left behind; the folders that were removed."""
        ...

    @abstractmethod
    def rename(self, name: str, other: str) -> None:
        """Give a checkpoint another name."""


def open_storage(root: str) -> Storage:
    """The storage at a local path, or at a URL with a scheme, as in "s3://bucket/runs"."""
    if "://" in root:
        return RemoteStorage(root)
    return LocalStorage(root)


def read_bytes(storage: Storage, path: str) -> bytes:
    """All of a file."""
    memory = bytearray(storage.size(path))
    storage.read_into(path, 0, memoryview(memory))
    return bytes(memory)


class LocalStorage(Storage):
    """A folder on this machine, or on a file system all ranks share."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._path = Path(root)

    def names(self, path: str = "") -> list[str]:
        try:
            return sorted(entry.name for entry in (self._path / path).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int:
        return (self._path / path).stat().st_size

    def make(self, path: str) -> None:
        (self._path / path).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        # Unbuffered: pieces are large, and no buffer is left unwritten when fsync is called.
        with (self._path / path).open("wb", buffering=0) as file:
            yield cast(BinaryIO, file)
            os.fsync(file.fileno())

    def read_into(self, path: str, offset: int, memory: memoryview) -> None:
        descriptor = os.open(self._path / path, os.O_RDONLY)
        try:
            done = 0
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done:]], offset + done)
                if count == 0:
                    raise _short(self.root, path, offset + len(memory))
                done += count
        finally:
            os.close(descriptor)

    def put(self, path: str, data: bytes) -> None:
        with self.create(f"{STAGING}{path}") as file:
            file.write(data)
        (self._path / f"{STAGING}{path}").replace(self._path / path)
        _sync(self._path)

    def remove(self, path: str) -> None:
        target = self._path / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def staging(self, name: str, token: str) -> str:
        return f"{STAGING}{name}-{token}"

    def publish(self, staging: str, name: str) -> None:
        _sync(self._path / staging)
        final, old = self._path / name, self._path / f"{REPLACED}{name}"
        if final.exists():
            final.rename(old)
        (self._path / staging).rename(final)
        _sync(self._path)
        if old.exists():
            shutil.rmtree(old)

    def clean(self) -> list[str]:
        removed = []
        for entry in self.names():
            if entry.startswith(REPLACED) and not (self._path / entry.removeprefix(REPLACED)).exists():
                # Killed between the two renames: the old one is the only one.
                (self._path / entry).rename(self._path / entry.removeprefix(REPLACED))
            elif entry.startswith((STAGING, REPLACED)):
                self.remove(entry)
                removed.append(entry)
        return removed

    def rename(self, name: str, other: str) -> None:
        (self._path / name).rename(self._path / other)
        _sync(self._path)


class RemoteStorage(Storage):
    """A folder that fsspec reaches; it has no rename, so the manifest, written last, makes a checkpoint one."""

    def __init__(self, root: str) -> None:
        import fsspec

        self.root = root
        try:
            self._fs, self._path = fsspec.core.url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{root}: {error}") from error

    def names(self, path: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in found)

    def size(self, path: str) -> int:
        return int(self._fs.size(self._at(path)))

    def make(self, path: str) -> None:
        self._fs.makedirs(self._at(path), exist_ok=True)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        with self._fs.open(self._at(path), "wb") as file:
            yield file

    def read_into(self, path: str, offset: int, memory: memoryview) -> None:
        data = self._fs.cat_file(self._at(path), start=offset, end=offset + len(memory))
        if len(data) != len(memory):
            raise _short(self.root, path, offset + len(memory))
        memory[:] = data

    def put(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(path), data)

    def remove(self, path: str) -> None:
        if self._fs.exists(self._at(path)):
            self._fs.rm(self._at(path), recursive=True)

    def staging(self, name: str, token: str) -> str:
        # A checkpoint of that name is none any more from here on: there is no way to replace it at once.
        self.remove(f"{name}/{MANIFEST}")
        self.remove(name)
        return name

    def publish(self, staging: str, name: str) -> None:
        assert staging == name

    def clean(self) -> list[str]:
        removed = [name for name in self.names() if name.startswith("step-") and MANIFEST not in self.names(name)]
        for name in removed:
            self.remove(name)
        return removed

    def rename(self, name: str, other: str) -> None:
        self._fs.mv(self._at(name), self._at(other), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}" if path else str(self._path)


def _short(root: str, path: str, expected: int) -> CheckpointError:
    return CheckpointError(f"{root}/{path} is too short: expected {expected} bytes or more; it was cut off")


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
