"""Tensors that wait in host memory, so that the device holds only what it works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

# Bytes: smaller tensors are not worth a transfer: statistics, scalars, targets.
SMALLEST = 2**16
# What must be left free on the device for the block that is worked on.
SCARCE = 0.25


class OnHost:
    """The values of one tensor in host memory; where the device is the host, outside torch's allocator."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        if not tensor.numel():
            self._values: Any = torch.empty_like(tensor)
            return
        if tensor.device.type == "cpu":
            # numpy knows no bf16: the bytes are what is kept.
            self._values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().copy()
            return
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._values.copy_(tensor.detach(), non_blocking=True)

    def tensor(self) -> torch.Tensor:
        """A copy on the device."""
        if isinstance(self._values, torch.Tensor):
            return self._values.to(self.device, non_blocking=True)
        return torch.from_numpy(self._values.copy()).view(self.dtype).reshape(self.shape)


class HostBatch(torch.Tensor):
    """A batch in host memory, cut into slices along its first dim; any operation on it first brings it back whole."""

    slices: list[OnHost]

    @staticmethod
    def __new__(cls, slices: Sequence[OnHost]) -> HostBatch:
        first = slices[0]
        shape = (sum(part.shape[0] for part in slices), *first.shape[1:])
        batch = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        batch.slices = list(slices)
        return batch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What autograd does to a tensor that only passes through.
        if func in _PASSING and isinstance(args[0], HostBatch):
            same_shape = func is not torch.ops.aten.view.default or list(args[1]) == list(args[0].shape)
            if same_shape:
                return HostBatch(args[0].slices)
        back = tree_map_only(HostBatch, HostBatch.whole, (args, kwargs or {}))
        return func(*back[0], **back[1])

    def whole(self) -> torch.Tensor:
        """All of it on the device."""
        return torch.cat([part.tensor() for part in self.slices])

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"HostBatch({tuple(self.shape)}, {len(self.slices)} slices)"


_PASSING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


@contextmanager
def on_host(enabled: bool | Literal["auto"]) -> Iterator[None]:
    """Keep what the backward needs in host memory from its forward on; parameters stay where they are.

    With "auto" a tensor goes there when the device has little memory left at that moment.
    """
    if not enabled:
        yield
        return
    pack = _to_host_if_scarce if enabled == "auto" else _to_host
    with saved_tensors_hooks(pack, _from_host):
        yield


def scarce(device: torch.device) -> bool:
    """Whether less than a quarter of the device's memory is free; never of the host's own."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused < SCARCE * total


def _to_host_if_scarce(tensor: torch.Tensor) -> torch.Tensor | OnHost:
    return _to_host(tensor) if scarce(tensor.device) else tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor | OnHost:
    base = tensor._base if tensor._base is not None else tensor
    # A leaf that requires a gradient is a parameter, and backends move parameters themselves.
    parameter = base.requires_grad and base.is_leaf
    if parameter or tensor.numel() * tensor.element_size() < SMALLEST or type(tensor) is not torch.Tensor:
        return tensor
    return OnHost(tensor)


def _from_host(kept: torch.Tensor | OnHost) -> torch.Tensor:
    return kept.tensor() if isinstance(kept, OnHost) else kept
