"""The live tensors of a rank's training state, by what they are: what a measured run adds up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.engines.footprint import STATES, Part


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Part, torch.Tensor]]:
    """What this rank holds of parameters, masters, gradients, optimizer state and buffers; a memory may come twice."""
    own = list(model.parameters())
    for parameter in own:
        yield "parameters", _local(parameter)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield "masters", _local(parameter)
            own.append(parameter)
    for parameter in own:
        if parameter.grad is not None:
            yield "gradients", _local(parameter.grad)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield "optimizer", _local(value)
    for buffer in model.buffers():
        yield "buffers", buffer


def bytes_of(tensors: Iterable[tuple[Part, torch.Tensor]], device: torch.device) -> dict[Part, int]:
    """Bytes of memory on a device by what it is for; each memory once, for what comes first."""
    seen: set[int] = set()
    sums: dict[Part, int] = dict.fromkeys(STATES, 0)
    for part, tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage._cdata not in seen:
            seen.add(storage._cdata)
            sums[part] += storage.nbytes()
    return sums


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, or all of it."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
