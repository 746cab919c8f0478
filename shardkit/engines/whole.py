"""What adapters of torch.optim share: the step, and the state of tensors that torch itself addresses.

They hold each parameter as a tensor (or a DTensor) of its own, unlike flat partitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from shardkit.engines.api import Interval, Kind, Precision, StepReport
from shardkit.engines.names import full_name, persistent_buffers, trainable


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The compute context of a precision: bf16 where torch's autocast lists say so for bf16-mixed, else nothing."""
    if precision == "bf16-mixed":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def clipped_step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], max_grad_norm: float | None
) -> StepReport:
    """Clip by the global norm, step, and zero the gradients; leave everything as it was when the norm is not finite.

    The coefficient is torch.nn.utils.clip_grad_norm_'s, max_norm / (norm + 1e-6) and at most 1. Reading the norm is
    the one synchronisation of a step: every rank reports it, and it decides whether there is a step.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = get_total_norm(gradients) if gradients else torch.zeros(())
    # A norm over shards is a DTensor that still has to be summed over the ranks.
    grad_norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
    finite = math.isfinite(grad_norm)
    if finite:
        if max_grad_norm is not None and grad_norm + 1e-6 > max_grad_norm:
            # What torch's own clipping calls; it also takes lists of DTensors.
            torch._foreach_mul_(gradients, max_grad_norm / (grad_norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage]
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepReport(grad_norm=grad_norm, skipped=not finite)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Interval]:
    """Parameters, optimizer tensors and buffers of a model whose tensors are plain or DTensors."""
    for raw_name, parameter in model.named_parameters():
        name = full_name(raw_name)
        yield from _pieces("parameter", name, None, parameter.detach())
    for name, parameter in trainable(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                yield from _pieces("optimizer", name, key, value)
    for name, buffer in persistent_buffers(model):
        yield from _pieces("buffer", name, None, buffer)


def _pieces(kind: Kind, name: str, state: str | None, tensor: torch.Tensor) -> Iterator[Interval]:
    shape, start, replicated, local = tuple(tensor.shape), 0, True, tensor
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local, replicated = tensor.to_local(), False
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        # Shard(0) of a contiguous tensor is a block of rows: one flat interval.
        start = offset[0] * math.prod(shape[1:]) if local.numel() else 0
    if local.numel() or replicated:
        yield Interval(
            kind=kind,
            name=name,
            state=state,
            shape=shape,
            start=start,
            tensor=local.reshape(-1),
            copy=_rank() if replicated else 0,
            copies=_size() if replicated else 1,
        )


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
