"""Export: whole tensors, in the model's own names, in plain safetensors files that anyone can load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardkit.checkpoint.manifest import Entry, File, Key
from shardkit.checkpoint.source import WEIGHT, Source
from shardkit.checkpoint.storage import Storage
from shardkit.checkpoint.tensors import DTYPES, PIECE, dtype_name, header, write, write_tensor

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weights_of(source: Source) -> dict[str, tuple[Key, Entry]]:
    """Parameters and buffers by the names of the model's state dict, tied ones under each of their names.

    A file for `load_state_dict(strict=True)` has to have them all: safetensors knows no two names of one tensor.
    """
    kinds = ("parameter", "buffer", WEIGHT)
    found = {key[1]: (key, entry) for key, entry in source.entries.items() if key[0] in kinds}
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


def export_folder(
    source: Source, storage: Storage, folder: str, *, dtype: torch.dtype | None = None, max_shard_size: int
) -> list[str]:
    """Write weights as a Hugging Face folder: one file or, where they take more, several and an index.

    Args:
        source: of a checkpoint.
        storage: of the folder, which is there.
        folder: in it.
        dtype: see `export_weights`.
        max_shard_size: bytes of tensors a file; a tensor that takes more has a file of its own.

    Returns:
        The names of the files.
    """
    sizes = bytes_of(weights_of(source), dtype)
    shards = _shards(sizes, max_shard_size)
    if len(shards) == 1:
        export_weights(source, storage, f"{folder}/{MODEL}", dtype=dtype)
        return [MODEL]
    homes: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        export_weights(source, storage, f"{folder}/{file}", dtype=dtype, names=names)
        homes |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": homes}
    with storage.create(f"{folder}/{INDEX}") as file:
        write(file, memoryview(json.dumps(index, indent=2).encode() + b"\n"))
    return [*dict.fromkeys(homes.values()), INDEX]


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


def whole(source: Source, key: Key) -> torch.Tensor:
    """All of one tensor, in memory."""
    entry = source.find(key)
    assert entry is not None, key
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    source.read(key, 0, tensor.view(-1))
    return tensor


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names by file, in order, each file as full as the limit lets it be."""
    shards: list[list[str]] = [[]]
    taken = 0
    for name, size in sizes.items():
        if shards[-1] and taken + size > limit:
            shards.append([])
            taken = 0
        shards[-1].append(name)
        taken += size
    return shards


def _cast(key: Key, entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    own = DTYPES[entry.dtype]
    wanted = dtype is not None and key[0] in ("parameter", WEIGHT) and own.is_floating_point
    return dtype if wanted and dtype is not None else own
