"""Peak memory of a piece of a training step, on an accelerator and on a CPU alike.

A CPU has no allocator statistics, so there the lifetimes of tensors are counted: every storage an operator makes is
seen by a dispatch mode, in the forward and in the backward (which runs on the calling thread), and counts until it is
freed. What one operator needs inside itself and frees again is not seen, nor is what numpy holds, which is what
`exact.offload` calls the host where the device is the host itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes:
    """Bytes of device memory in use inside the block, above what was there when it was entered.

        with PeakBytes(device) as used:
            loss_fn(model, batch)[0].backward()
        print(used.peak, used.current)

    On CUDA the numbers are the allocator's, and entering resets its peak statistics; on a CPU they are of tensors
    made inside the block, by the thread that entered it. Views and in-place operators add nothing. Both numbers can
    be read inside the block and stay what they were at its end; the same object can be entered again.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._counter: Lifetimes | None = None
        self._start = 0
        self._peak = self._current = 0
        self._inside = False

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        if self._inside:
            self._read()
        return self._peak

    @property
    def current(self) -> int:
        """Bytes in use now, or at the end of the block; negative on CUDA where more was freed than made."""
        if self._inside:
            self._read()
        return self._current

    def __enter__(self) -> PeakBytes:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            self._counter = Lifetimes(self.device.type)
            self._counter.__enter__()
        self._inside = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._read()
        self._inside = False
        if self._counter is not None:
            self._counter.__exit__(*error)
            self._counter = None

    def _read(self) -> None:
        if self._counter is not None:
            self._peak, self._current = self._counter.peak, self._counter.current
            return
        torch.cuda.synchronize(self.device)
        self._peak = max(torch.cuda.max_memory_allocated(self.device) - self._start, 0)
        self._current = torch.cuda.memory_allocated(self.device) - self._start


class Lifetimes(TorchDispatchMode):
    """Counts the storages that operators make on one type of device, from their making to their end.

        with Lifetimes() as alive:
            alive.see(model.parameters())
            loss_fn(model, batch)[0].backward()
        print(alive.peak, alive.current)

    `peak` and `current` are bytes; setting `peak` to `current` begins a new peak. A storage that is resized counts with
    its new size from then on. Fake tensors count as what they stand for.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.peak = self.current = 0
        self._device_type = device_type
        # By address: what is at an address is gone before something else can be. A weak reference keeps its callback.
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._apart: set[int] = set()
        self._resize: Any = None

    def __enter__(self) -> Lifetimes:
        super().__enter__()
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._alive:
                self._see(storage)
                self.peak = max(self.peak, self.current)
            return result

        torch.UntypedStorage.resize_ = counted  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what was made before."""
        for storage in self._storages(list(tensors)):
            self._see(storage)
        self.peak = max(self.peak, self.current)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage no longer, as something else accounts for it."""
        for storage in self._storages(tensor):
            address = storage._cdata
            known, size = self._alive.get(address, (None, 0))
            if known is not None and address not in self._apart:
                self._apart.add(address)
                self.current -= size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A tensor made of tensors (DTensor and its like) comes back here with those it is made of.
            return NotImplemented
        given = {storage._cdata: storage for storage in self._storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for address, storage in given.items():
            # An operator may have resized it; what was made before is not counted.
            if address in self._alive and self._alive[address][1] != storage.nbytes():
                self._see(storage)
        for storage in self._storages(result):
            if storage._cdata not in given:
                self._see(storage)
        self.peak = max(self.peak, self.current)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new, or what it has grown or shrunk by."""
        address, size = storage._cdata, storage.nbytes()
        known, counted = self._alive.get(address, (None, 0))
        if known is None:
            known = weakref.ref(storage, lambda _: self._end(address))
        self._alive[address] = (known, size)
        if address not in self._apart:
            self.current += size - counted

    def _end(self, address: int) -> None:
        _, size = self._alive.pop(address, (None, 0))
        if address in self._apart:
            self._apart.discard(address)
        else:
            self.current -= size

    def _storages(self, values: Any) -> list[torch.UntypedStorage]:
        return [
            value.untyped_storage()
            for value in tree_leaves(values)
            if isinstance(value, torch.Tensor)
            and value.device.type == self._device_type
            and value.layout == torch.strided
            and not _is_hollow(value)
        ]


def _is_hollow(value: torch.Tensor) -> bool:
    """Whether a tensor of a subclass keeps its values elsewhere, as a batch that waits on the host does."""
    if type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return False
    try:
        return value.untyped_storage().data_ptr() == 0 and value.numel() > 0
    except RuntimeError:  # there is none to point to
        return True


__all__ = ["Lifetimes", "PeakBytes"]
