"""What was found in another library's checkpoint, and how it becomes a shardkit checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.checkpoint.encoding import encode
from shardkit.checkpoint.manifest import Chunk, Entry, File, Key, Manifest, dump, shown
from shardkit.checkpoint.save import versions
from shardkit.checkpoint.shard import file_name
from shardkit.checkpoint.storage import MANIFEST, Storage
from shardkit.checkpoint.tensors import dtype_name, header, write, write_tensor
from shardkit.errors import CheckpointError, RequestError

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One tensor, read a few MiB at a time, or a piece of a few ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterable[torch.Tensor]]
    # Its elements in row-major order.


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Another library's checkpoint."""

    origin: str
    # The library and layout, as "deepspeed zero3".
    world_size: int
    step: int | None
    # None = it does not say.
    tensors: Mapping[Key, Found]
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Parameter -> what the optimizer keeps for it that is no tensor.
    groups: Sequence[Mapping[str, Any]] = ()
    # "parameters" and "options" each.
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    # What else it says, kept as it is.
    notes: tuple[str, ...] = ()
    # What a user has to know.


def kind_of(name: str, dtype: torch.dtype, trained: bool) -> str:
    """Parameter or buffer, where a name tells; else "weight", which is found as either."""
    if trained:
        return "parameter"
    if name.rpartition(".")[2] in _BUFFERS or not (dtype.is_floating_point or dtype.is_complex):
        return "buffer"
    return "weight"


def split_state(state: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's state of one parameter as tensors, and numbers as torch.optim keeps them."""
    tensors, numbers = {}, {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (value.dim() > 0 or (not shape and key != "step")):
            tensors[key] = value
        elif isinstance(value, torch.Tensor | int | float | bool | None):
            # Some libraries count in a Python int what torch.optim counts in a tensor.
            numbers[key] = torch.tensor(float(value)) if key == "step" and isinstance(value, int | float) else value
    return tensors, numbers


def step_of(numbers: Mapping[str, Mapping[str, Any]]) -> int | None:
    """The most steps an optimizer made for a parameter."""
    return max((int(values["step"]) for values in numbers.values() if values.get("step") is not None), default=None)


def optimizer_class(imported: Imported, given: str | None) -> tuple[str, tuple[str, ...]]:
    """The optimizer's class, and what to say about how it was found.

    Raises:
        RequestError: there is state of an optimizer, and what it keeps does not tell which.
    """
    if given is not None:
        return given, ()
    states = {key[2] for key in imported.tensors if key[0] == "optimizer"} | {
        name for values in imported.numbers.values() for name in values
    }
    options = dict(imported.groups[0]["options"]) if imported.groups else {}
    if not states and not options:
        return "", ()
    if {"exp_avg", "exp_avg_sq"} <= states or {"betas", "eps"} <= set(options):
        decoupled = options.get("decoupled_weight_decay")
        if decoupled is not None:
            return ("torch.optim.adamw.AdamW" if decoupled else "torch.optim.adam.Adam"), ()
        return "torch.optim.adamw.AdamW", ("its optimizer is taken for torch.optim.adamw.AdamW; --optimizer says else",)
    if "momentum_buffer" in states or "momentum" in options:
        return "torch.optim.sgd.SGD", ()
    raise RequestError(
        f"the optimizer keeps {', '.join(sorted(map(str, states)))} for its parameters, which does not tell its class; "
        "name it with --optimizer, as --optimizer torch.optim.rmsprop.RMSprop"
    )


def write_imported(storage: Storage, folder: str, imported: Imported, *, step: int, optimizer: str) -> Manifest:
    """Write it as a shardkit checkpoint, a few MiB at a time.

    Raises:
        CheckpointError: its tensors are not what they were said to be, or cannot be stored.
    """
    own = file_name(0, 1)
    rows = [(_title(key), dtype_name(found.dtype), found.shape) for key, found in imported.tensors.items()]
    flat = [(title, dtype, (math.prod(shape),)) for title, dtype, shape in rows]
    first, offsets = header(flat, {"format": "pt", "written_by": "shardkit"})
    with storage.create(f"{folder}/{own}") as file:
        checksum, size = write(file, memoryview(first)), len(first)
        for key, found in imported.tensors.items():
            for piece in _checked(key, found):
                checksum = write_tensor(file, piece, checksum)
                size += piece.numel() * piece.element_size()
    entries = {
        key: Entry(
            shape=found.shape,
            dtype=dtype_name(found.dtype),
            chunks=(Chunk(start=0, length=math.prod(found.shape), file=own, offset=offset),),
        )
        for (key, found), offset in zip(imported.tensors.items(), offsets, strict=True)
    }
    manifest = Manifest(
        step=step,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        backend=imported.origin,
        world_size=imported.world_size,
        versions=versions(),
        files={own: File(bytes=size, crc32=f"{checksum:08x}")},
        entries=entries,
        aliases=imported.aliases,
        optimizer=optimizer,
        numbers={
            name: {key: encode(value, f"{key} of {name}") for key, value in values.items()}
            for name, values in imported.numbers.items()
        },
        groups=[
            {
                "parameters": list(group["parameters"]),
                "options": _kept(group["options"]),
            }
            for group in imported.groups
        ],
        training={"step": step, "imported": {"from": imported.origin, **_kept(imported.extra)}},
    )
    with storage.create(f"{folder}/{MANIFEST}") as file:
        write(file, memoryview(dump(manifest)))
    return manifest


def _checked(key: Key, found: Found) -> Iterator[torch.Tensor]:
    """The pieces, of the dtype and number of elements that were said."""
    count, expected = 0, math.prod(found.shape)
    for piece in found.pieces():
        if piece.dtype != found.dtype:
            raise CheckpointError(f"{shown(key)} is {piece.dtype} in one place and {found.dtype} in another")
        count += piece.numel()
        yield piece.contiguous().view(-1)
    if count != expected:
        raise CheckpointError(f"{shown(key)} has {count} elements, and its shape {found.shape} has {expected}")


def _title(key: Key) -> str:
    return "/".join(part for part in key if part is not None) + "@0"


def _kept(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What of it can be kept without a pickle; a hook in a parameter group, say, cannot."""
    kept = {}
    for key, value in extra.items():
        try:
            kept[str(key)] = encode(value, str(key))
        except CheckpointError:
            continue
    return kept


def pieces_of(tensor: torch.Tensor) -> Callable[[], Iterator[torch.Tensor]]:
    """Of a tensor that is in memory."""
    return lambda: iter([tensor.detach().contiguous().view(-1)])
