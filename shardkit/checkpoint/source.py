"""A source: named tensors that can be read by any range of elements, wherever their bytes lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.checkpoint.manifest import Chunk, Entry, Key, Manifest, shown
from shardkit.checkpoint.storage import Storage
from shardkit.checkpoint.tensors import DTYPES, PIECE, memory_of, read_header

WEIGHT = "weight"
# Kind of what comes from plain files, which do not tell parameters from buffers.


@dataclass(frozen=True, kw_only=True)
class Source:
    """Entries and the place of their files."""

    storage: Storage
    folder: str
    # Of the files, in the storage.
    entries: Mapping[Key, Entry]
    aliases: Mapping[str, str]
    # Other names -> the name an entry has.
    normalization: Mapping[str, Any] | None = None
    # What the policy had made of each norm layer; None = not known.

    def find(self, key: Key) -> Entry | None:
        """The entry of a key, under this name or the one it is an alias of."""
        kind, name, state = key
        own = self.aliases.get(name, name)
        found = self.entries.get(key) or self.entries.get((kind, own, state))
        return found or (self.entries.get((WEIGHT, name, None)) if state is None else None)

    def read(self, key: Key, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D `target` with the elements from `start` on, cast to its dtype.

        What has the stored dtype and lies in host memory is read in place; anything else by pieces of 4 MiB.

        Raises:
            CheckpointError: a file is too short.
            OSError: a file cannot be read.
        """
        entry = self.find(key)
        assert entry is not None and start + target.numel() <= entry.numel, shown(key)
        stop = start + target.numel()
        for chunk in entry.chunks:
            begin, end = max(start, chunk.start), min(stop, chunk.start + chunk.length)
            if begin < end:
                self._read(entry, chunk, begin, target[begin - start : end - start])

    def _read(self, entry: Entry, chunk: Chunk, begin: int, target: torch.Tensor) -> None:
        dtype = DTYPES[entry.dtype]
        path = f"{self.folder}/{chunk.file}" if self.folder else chunk.file
        offset = chunk.offset + (begin - chunk.start) * dtype.itemsize
        if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
            self.storage.read_into(path, offset, memory_of(target))
            return
        step = PIECE // dtype.itemsize
        for first in range(0, target.numel(), step):
            part = target[first : first + step]
            passage = torch.empty(part.numel(), dtype=dtype)
            self.storage.read_into(path, offset + first * dtype.itemsize, memory_of(passage))
            part.copy_(passage)


def source_of(storage: Storage, name: str, manifest: Manifest) -> Source:
    """The tensors of a checkpoint."""
    return Source(storage=storage, folder=name, entries=manifest.entries, aliases=manifest.aliases)


def source_of_files(storage: Storage, files: list[str]) -> Source:
    """The tensors of safetensors files.

    Raises:
        CheckpointError: one is none, or two hold a tensor of one name.
    """
    entries: dict[Key, Entry] = {}
    for file in files:
        for name, stored in read_header(storage, file)[0].items():
            numel = stored.length // DTYPES[stored.dtype].itemsize
            chunk = Chunk(start=0, length=numel, file=file, offset=stored.offset)
            entries[WEIGHT, name, None] = Entry(shape=stored.shape, dtype=stored.dtype, chunks=(chunk,))
    return Source(storage=storage, folder="", entries=entries, aliases={})
