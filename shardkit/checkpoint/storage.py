"""Where checkpoints lie: a local folder, or any place that fsspec reaches by a URL with a scheme.

A checkpoint becomes visible whole or not at all. Local folders are renamed into place; an object store has no rename,
so there a folder counts from the moment its manifest, written last, is in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
            OSError: it is not there, or no file.
        """
        ...

    @abstractmethod
    def make(self, path: str) -> None:
        """Make the folder `path`, and those above it."""

    @abstractmethod
    def claim(self) -> None:
        """Make the folder and hold it until this process ends, so that no other run writes into it.

        Raises:
            CheckpointError: another process of this machine holds it.
            OSError: it cannot be made.
        """

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
    def abandon(self, staging: str, name: str) -> None:
        """Remove what was written in `staging`; a checkpoint `name` that was there before is there again."""

    @abstractmethod
    def clean(self) -> list[str]:
        """Remove what writers that were killed left behind; the folders that were removed."""
        ...

    @abstractmethod
    def rename(self, name: str, other: str) -> None:
        """Give a checkpoint another name."""


def open_storage(root: str) -> Storage:
    """The storage at a local path, or at a URL with a scheme, as in "s3://bucket/runs".

    Raises:
        CheckpointError: the scheme is not known, or its library is not installed.
    """
    if root.startswith("file://"):
        # fsspec would write these without fsync and without a rename.
        return LocalStorage(root.removeprefix("file://"))
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
        found = (self._path / path).stat()
        if not stat.S_ISREG(found.st_mode):
            # A pipe would keep its reader waiting.
            raise OSError(errno.EINVAL, "not a regular file", str(self._path / path))
        return found.st_size

    def make(self, path: str) -> None:
        folder = self._path / path
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            _sync(each.parent)

    def claim(self) -> None:
        self.make("")
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"another run is at work in {self.root}; wait for its end, stop it, or give another folder"
            ) from None
        except OSError:
            # A file system without locks.
            os.close(descriptor)

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
        target = self._path / path
        part = target.with_name(f"{STAGING}{target.name}")
        try:
            with self.create(str(part.relative_to(self._path))) as file:
                _write_all(file, data)
            part.replace(target)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise
        _sync(target.parent)

    def remove(self, path: str) -> None:
        target = self._path / path
        if not target.is_dir() or target.is_symlink():
            target.unlink(missing_ok=True)
            return
        if not target.name.startswith(STAGING):
            # Out of sight first: a checkpoint half removed would be a broken one.
            target = target.rename(target.with_name(f"{STAGING}{target.name}-{secrets.token_hex(4)}"))
        shutil.rmtree(target)

    def staging(self, name: str, token: str) -> str:
        return f"{STAGING}{name}-{token}"

    def publish(self, staging: str, name: str) -> None:
        _sync(self._path / staging)
        final, old = self._path / name, self._path / f"{REPLACED}{name}"
        if final.exists():
            self.remove(old.name)
            final.rename(old)
        try:
            (self._path / staging).rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
        _sync(self._path)
        # The checkpoint is there; what cannot be removed now is removed at the next start.
        with suppress(OSError):
            self.remove(old.name)

    def abandon(self, staging: str, name: str) -> None:
        self.remove(staging)

    def clean(self) -> list[str]:
        removed = []
        for entry in self.names():
            if entry.startswith(REPLACED) and not (self._path / entry.removeprefix(REPLACED)).exists():
                # Killed between the two renames: the old one is the only one. It is whole, for it is removed only
                # under another name.
                self.rename(entry, entry.removeprefix(REPLACED))
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
        self.root = root
        try:
            import fsspec

            self._fs, self._path = fsspec.core.url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{root} cannot be opened: {error}") from error

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

    def claim(self) -> None:
        """An object store has no locks."""
        self.make("")

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
        if MANIFEST in self.names(name):
            self._move(name, REPLACED + name)
        else:
            self.remove(name)
        return name

    def publish(self, staging: str, name: str) -> None:
        assert staging == name
        with suppress(Exception):
            # What cannot be removed now is removed at the next start.
            self._remove_checkpoint(REPLACED + name)

    def abandon(self, staging: str, name: str) -> None:
        self._remove_checkpoint(name)
        if MANIFEST in self.names(REPLACED + name):
            self._move(REPLACED + name, name)

    def clean(self) -> list[str]:
        removed = []
        for name in self.names():
            own = name.removeprefix(REPLACED)
            if own.startswith("step-") and MANIFEST not in self.names(name):
                self.remove(name)
                removed.append(name)
            elif name != own and MANIFEST in self.names(own):
                self._remove_checkpoint(name)
                removed.append(name)
            elif name != own:
                self.abandon(own, own)
        return removed

    def rename(self, name: str, other: str) -> None:
        if MANIFEST in self.names(name):
            self._move(name, other)
        else:
            self._fs.mv(self._at(name), self._at(other), recursive=True)

    def _move(self, name: str, other: str) -> None:
        """Copy a checkpoint, its manifest last, and remove the first: one of the two is whole at any moment."""
        self._remove_checkpoint(other)
        self.make(other)
        files = self.names(name)
        for file in sorted(files, key=lambda each: each == MANIFEST):
            self._fs.cp_file(self._at(f"{name}/{file}"), self._at(f"{other}/{file}"))
        self._remove_checkpoint(name)

    def _remove_checkpoint(self, name: str) -> None:
        """Without its manifest it is none, whatever is left of it."""
        self.remove(f"{name}/{MANIFEST}")
        self.remove(name)

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}" if path else str(self._path)


def _short(root: str, path: str, expected: int) -> CheckpointError:
    return CheckpointError(f"{root}/{path} is too short: expected {expected} bytes or more; it was cut off")


def _write_all(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _sync(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
