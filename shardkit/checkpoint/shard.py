"""A shard: what one rank writes of a checkpoint, and the file it writes it to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from shardkit.checkpoint.manifest import Chunk, File, Key
from shardkit.checkpoint.storage import Storage
from shardkit.checkpoint.tensors import dtype_name, header, write, write_tensor
from shardkit.engines.api import Engine, Interval

SMALL = 4096
# Elements under which one of the equal copies is written whole.


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive elements of one tensor that this rank writes."""

    key: Key
    shape: tuple[int, ...]
    dtype: str
    start: int
    tensor: torch.Tensor
    # 1-D, live or a snapshot.


@dataclass(frozen=True, kw_only=True)
class Written:
    """One part in a file."""

    key: Key
    shape: tuple[int, ...]
    dtype: str
    chunk: Chunk


def own_parts(engine: Engine) -> Iterator[Part]:
    """What this rank writes of the live state: over all ranks, each element once.

    Of equal copies each writes its share of the elements, small ones one of them whole. Buffers are rank 0's: they may
    differ by rank, and pieces of several would be nobody's.
    """
    for interval in engine.state():
        begin, end = _share(interval)
        if begin < end or (end == 0 == interval.tensor.numel() and interval.copy == 0):
            yield Part(
                key=(interval.kind, interval.name, interval.state),
                shape=interval.shape,
                dtype=dtype_name(interval.tensor.dtype),
                start=interval.start + begin,
                tensor=interval.tensor[begin:end],
            )


def file_name(rank: int, size: int) -> str:
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


def write_shard(storage: Storage, folder: str, name: str, parts: list[Part]) -> tuple[list[Written], File]:
    """Write `parts` to a safetensors file, each as a 1-D tensor named by its key and first element."""
    tensors = [(_title(part), part.dtype, (part.tensor.numel(),)) for part in parts]
    first, offsets = header(tensors, {"format": "pt", "written_by": "shardkit"})
    with storage.create(f"{folder}/{name}") as file:
        checksum = write(file, memoryview(first))
        size = len(first)
        for part in parts:
            checksum = write_tensor(file, part.tensor, checksum)
            size += part.tensor.numel() * part.tensor.element_size()
    written = [
        Written(
            key=part.key,
            shape=part.shape,
            dtype=part.dtype,
            chunk=Chunk(start=part.start, length=part.tensor.numel(), file=name, offset=offset),
        )
        for part, offset in zip(parts, offsets, strict=True)
    ]
    return written, File(bytes=size, crc32=f"{checksum:08x}")


class Snapshot:
    """Host memory for a rank's parts, kept from one save to the next: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, parts: list[Part]) -> tuple[list[Part], Callable[[], None]]:
        """The parts as they are now, and what copies the moments among them; the last snapshot's memory is used again.

        Weights and buffers are copied at once. Moments change at the next step of the optimizer alone, so they can be
        copied while training computes, by whoever calls that function before the step.
        """
        sizes = [part.tensor.numel() * part.tensor.element_size() for part in parts]
        # Each on a multiple of 16 bytes: a view of another dtype needs an aligned beginning.
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 16) * 16)
        if self._memory.numel() < starts[-1]:
            pinned = torch.cuda.is_available()
            self._memory = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=pinned)
        places = [
            self._memory[start : start + size].view(part.tensor.dtype)
            for part, start, size in zip(parts, starts, sizes, strict=False)
        ]
        pairs = list(zip(places, parts, strict=True))
        _copy([(place, part.tensor) for place, part in pairs if part.key[0] != "optimizer"])
        moments = [(place, part.tensor) for place, part in pairs if part.key[0] == "optimizer"]
        return [replace(part, tensor=place) for place, part in pairs], lambda: _copy(moments)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for place, tensor in pairs:
        place.copy_(tensor, non_blocking=tensor.is_cuda)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _share(interval: Interval) -> tuple[int, int]:
    """The elements of an interval that this copy of it writes."""
    numel, copy, copies = interval.tensor.numel(), interval.copy, interval.copies
    if interval.kind == "buffer":
        return (0, numel) if copy == 0 else (0, 0)
    if numel < SMALL:
        digest = hashlib.sha256(repr((interval.kind, interval.name, interval.state, interval.start)).encode()).digest()
        return (0, numel) if int.from_bytes(digest[:8], "little") % copies == copy else (0, 0)
    return numel * copy // copies, numel * (copy + 1) // copies


def _title(part: Part) -> str:
    kind, name, state = part.key
    return "/".join(each for each in (kind, name, state) if each is not None) + f"@{part.start}"
