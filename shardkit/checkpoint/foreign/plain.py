"""Plain data between two processes: JSON, with the tensors beside it in a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.foreign.unpickler import Thing
from shardkit.checkpoint.storage import LocalStorage
from shardkit.checkpoint.tensors import DTYPES, NAMES, PIECE, Stored, header, memory_of, read_header, write


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor in a safetensors file."""

    storage: LocalStorage
    file: str
    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.stored.dtype]

    @property
    def numel(self) -> int:
        return self.stored.length // self.dtype.itemsize

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """Its elements from `start` to `stop` in order, a few MiB at a time."""
        stop = self.numel if stop is None else stop
        step = PIECE // self.dtype.itemsize
        for first in range(start, stop, step):
            piece = torch.empty(min(step, stop - first), dtype=self.dtype)
            self.storage.read_into(self.file, self.stored.offset + first * self.dtype.itemsize, memory_of(piece))
            yield piece

    def tensor(self) -> torch.Tensor:
        """All of it."""
        return torch.cat([torch.empty(0, dtype=self.dtype), *self.pieces()]).view(self.shape)


@dataclass
class _Writing:
    tensors: list[torch.Tensor] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)
    # What is being encoded: an object that holds itself is not followed.

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) in self.inside:
            return _thing("itself")
        self.inside.add(id(value))
        try:
            return self._encode(value)
        finally:
            self.inside.discard(id(value))

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype not in NAMES or value.layout != torch.strided:
                return _thing(f"a tensor of {value.dtype}")
            self.tensors.append(value.detach())
            return {"tensor": len(self.tensors) - 1}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(each)] for key, each in value.items()]}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.encode(each) for each in value]
        if isinstance(value, Thing):
            return _thing(value.named, self.encode(value.args), self.encode(value.state))
        if isinstance(value, torch.dtype | torch.device):
            return str(value)
        return _thing(type(value).__name__)


def _thing(named: str, args: Any = (), state: Any = None) -> dict[str, Any]:
    return {"thing": named, "args": args, "state": state}


def write_plain(value: Any, folder: Path, name: str) -> None:
    """Write `name`.json and `name`.safetensors."""
    writing = _Writing()
    text = json.dumps(writing.encode(value))
    rows = [(str(index), NAMES[t.dtype], tuple(t.shape)) for index, t in enumerate(writing.tensors)]
    first, _ = header(rows, {})
    with LocalStorage(folder).create(f"{name}.safetensors") as file:
        write(file, memoryview(first))
        for tensor in writing.tensors:
            flat = tensor.contiguous().view(-1)
            for begin in range(0, flat.numel(), PIECE):
                write(file, memory_of(flat[begin : begin + PIECE]))
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def read_plain(folder: Path, name: str) -> Any:
    """What was written; its tensors are `Kept`."""
    storage = LocalStorage(folder)
    stored, _ = read_header(storage, f"{name}.safetensors")

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return Kept(storage=storage, file=f"{name}.safetensors", stored=stored[str(value["tensor"])])
        if "dict" in value:
            return {_hashable(decode(key)): decode(each) for key, each in value["dict"]}
        thing = type("Thing", (Thing,), {"named": value["thing"]})(*decode(value["args"]))
        thing.state = decode(value["state"])
        return thing

    return decode(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
