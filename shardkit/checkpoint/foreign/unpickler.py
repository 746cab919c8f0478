"""Pickles as plain data: objects are never made, only described, and only names that are known are called.

Everything a pickle names beyond torch's own tensors becomes a `Thing`: its class name, arguments and state. So no code
of a pickle's choosing runs. A checkpoint of unknown origin is opened in a process of its own all the same.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import _utils


class Forbidden(Exception):
    """A pickle names something that is not on the list."""


class Thing:
    """An object of a pickle, described and not made."""

    named = ""
    # Its class, "module.name".

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **_: Any) -> Thing:
        # A pickle may make an object without calling __init__.
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    def __call__(self, *args: Any, **_: Any) -> Thing:
        # What a call of it would have made: a method that a pickle looked up, say.
        return type(self)(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def get(self, key: str) -> Any:
        """An attribute of the object, if its state has it."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def _rebuilt(function: Callable[..., Any], _: Any, args: Any, __: Any) -> Any:
    """A tensor without the attributes someone gave it."""
    return function(*args)


def _parameter(data: Any, requires_grad: bool, hooks: Any, *_: Any) -> Any:
    return data


# What is made for real: containers, and what a tensor consists of.
_TENSORS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
    ("torch", "Size"): tuple,
    ("torch", "device"): torch.device,
    ("torch", "Tensor"): torch.Tensor,
    ("torch._utils", "_rebuild_tensor"): _utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
}
for _module in ("builtins", "__builtin__"):
    _TENSORS |= {(_module, kind.__name__): kind for kind in (set, frozenset, complex, bytearray, list, dict, tuple)}


class Unpickler(pickle.Unpickler):
    """Makes plain data and tensors; of anything else a `Thing`."""

    allowed: Collection[tuple[str, str]] | None = None
    # The only other names that may occur; None = any.

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TENSORS:
            return _TENSORS[module, name]
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
            if name.endswith("Storage") and isinstance(found, type):
                return found
        if self.allowed is not None and (module, name) not in self.allowed:
            raise Forbidden(f"{module}.{name}")
        return type(name.rpartition(".")[2] or "Thing", (Thing,), {"named": f"{module}.{name}"})


def loads(data: bytes, allowed: Collection[tuple[str, str]] | None) -> Any:
    """The plain data in a pickle that holds no tensors.

    Raises:
        Forbidden: it names something that is not in `allowed`.
    """
    reader = Unpickler(io.BytesIO(data))
    reader.allowed = allowed
    return reader.load()


class _Module:
    """What torch.load takes for the pickle module."""

    __name__ = "shardkit.checkpoint.foreign.unpickler"
    Unpickler = Unpickler

    @staticmethod
    def load(file: Any, **_: Any) -> Any:
        return Unpickler(file).load()


def load_torch(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """What torch.save wrote to a file, or to a part of one, as plain data and tensors.

    Raises:
        Forbidden: it is TorchScript.
    """
    if length is None and offset == 0 and zipfile.is_zipfile(path):
        _refuse_script(path)
        # Mapped: what is not looked at is not read.
        return torch.load(path, map_location="cpu", pickle_module=_Module, mmap=True, weights_only=False)
    with path.open("rb") as file:
        file.seek(offset)
        part = io.BytesIO(file.read(-1 if length is None else length))
    if zipfile.is_zipfile(part):
        _refuse_script(part)
    part.seek(0)
    return torch.load(part, map_location="cpu", pickle_module=_Module, weights_only=False)


def _refuse_script(file: Any) -> None:
    """TorchScript archives are programs; torch.load would run its own reader of them."""
    with zipfile.ZipFile(file) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise Forbidden("a TorchScript program")
