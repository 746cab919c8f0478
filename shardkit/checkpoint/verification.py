"""Verification: the files of a checkpoint are those that were written."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.manifest import Manifest, read
from shardkit.checkpoint.storage import Storage
from shardkit.checkpoint.tensors import PIECE
from shardkit.errors import CheckpointError
from shardkit.world import World

Verify = Literal["full", "size"]


def verify_file(storage: Storage, name: str, manifest: Manifest, file: str, how: Verify = "full") -> None:
    """One file of the checkpoint `name` has the size, and with "full" the checksum, of its manifest.

    Raises:
        CheckpointError: names the file and says what is wrong with it.
    """
    path, expected = f"{name}/{file}", manifest.files[file]
    where = f"{storage.root}/{path}"
    try:
        size = storage.size(path)
        if size != expected.bytes:
            raise CheckpointError(f"{where} is damaged: it has {size} bytes, and {expected.bytes} were written")
        checksum, memory = 0, bytearray(PIECE)
        for offset in range(0, size if how == "full" else 0, PIECE):
            part = memoryview(memory)[: min(PIECE, size - offset)]
            storage.read_into(path, offset, part)
            checksum = zlib.crc32(part, checksum)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is not there") from error
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
    if how == "full" and f"{checksum:08x}" != expected.crc32:
        raise CheckpointError(f"{where} is damaged: its crc32 is {checksum:08x}, and {expected.crc32} was written")


def verify_files(storage: Storage, name: str, manifest: Manifest, files: Iterable[str], how: Verify = "full") -> None:
    """All of `files`; every one that is damaged is named.

    Raises:
        CheckpointError: one or more are.
    """
    found = []
    for file in files:
        try:
            verify_file(storage, name, manifest, file, how)
        except CheckpointError as error:
            found.append(str(error))
    if found:
        raise CheckpointError("; ".join(found))


def open_verified(storage: Storage, name: str, world: World, how: Verify = "full") -> Manifest:
    """The manifest of the checkpoint `name`, after its files were verified, shared out over the ranks. A collective.

    Raises:
        CheckpointError: on all ranks: it is damaged, or the ranks do not see the same.
    """

    def look() -> Manifest:
        manifest = read(storage, name)
        verify_files(storage, name, manifest, sorted(manifest.files)[world.rank :: world.size], how)
        return manifest

    manifest = agreed(world, f"{storage.root}/{name} cannot be used", look)
    if len(set(world.gather(manifest.digest))) > 1:
        raise CheckpointError(
            f"the ranks see different checkpoints at {storage.root}/{name}; it must be a folder that all of them share"
        )
    return manifest
