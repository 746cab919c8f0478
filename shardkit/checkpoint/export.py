"""Export: whole tensors, in the model's own names, in plain safetensors files that anyone can load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardkit.checkpoint.manifest import Entry, File, Key
from shardkit.checkpoint.source import Source
from shardkit.checkpoint.storage import Storage
from shardkit.checkpoint.tensors import DTYPES, PIECE, dtype_name, header, write, write_tensor

MODEL = "model.safetensors"


def weights_of(source: Source) -> dict[str, tuple[Key, Entry]]:
    """Parameters and buffers by the names of the model's state dict, tied ones under each of their names."""
    found = {key[1]: (key, entry) for key, entry in source.entries.items() if key[0] in ("parameter", "buffer")}
    for alias, name in source.aliases.items():
        if name in found:
            found[alias] = found[name]
    return found


def export_weights(
    source: Source,
    storage: Storage,
    path: str,
    *,
    dtype: torch.dtype | None = None,
    names: Sequence[str] | None = None,
) -> File:
    """Write weights to one safetensors file, a few MiB at a time.

    Args:
        source: of a checkpoint.
        storage: of the file.
        path: of the file, in it.
        dtype: floating-point parameters are cast to it; None = as they are kept.
        names: which; all by default.

    Raises:
        OSError: it cannot be written.
    """
    weights = weights_of(source)
    chosen = {name: weights[name] for name in (names if names is not None else weights)}
    dtypes = {name: _cast(key, entry, dtype) for name, (key, entry) in chosen.items()}
    rows = [(name, dtype_name(dtypes[name]), entry.shape) for name, (_, entry) in chosen.items()]
    first, _ = header(rows, {"format": "pt"})
    with storage.create(path) as file:
        checksum, size = write(file, memoryview(first)), len(first)
        for name, (key, entry) in chosen.items():
            for piece in pieces(source, key, entry, dtypes[name]):
                checksum = write_tensor(file, piece, checksum)
                size += piece.numel() * piece.element_size()
    return File(bytes=size, crc32=f"{checksum:08x}")


def bytes_of(chosen: Mapping[str, tuple[Key, Entry]], dtype: torch.dtype | None) -> dict[str, int]:
    """How many bytes each of the tensors will take."""
    return {name: entry.numel * _cast(key, entry, dtype).itemsize for name, (key, entry) in chosen.items()}


def pieces(source: Source, key: Key, entry: Entry, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
    """The elements of a tensor in order, as 1-D tensors of at most 4 MiB."""
    dtype = dtype or DTYPES[entry.dtype]
    step = PIECE // dtype.itemsize
    for start in range(0, entry.numel, step):
        piece = torch.empty(min(step, entry.numel - start), dtype=dtype)
        source.read(key, start, piece)
        yield piece


def _cast(key: Key, entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    own = DTYPES[entry.dtype]
    return dtype if dtype is not None and key[0] == "parameter" and own.is_floating_point else own
