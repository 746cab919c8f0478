"""What adapters of torch.optim share: the step, and the state of tensors that torch itself addresses.

They hold each parameter as a tensor (or a DTensor) of its own, unlike flat partitions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.utils import get_total_norm

from shardkit.engines.api import Interval, Kind, NamedParameters, OptimizerState, Precision, Scalar, StepReport
from shardkit.engines.kept import check_names, is_tensor, numbers, placed, refuse_pending
from shardkit.engines.names import full_name, persistent_buffers, trainable
from shardkit.errors import EngineError
from shardkit.world import World


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


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Iterator[Interval]:
    """Parameters, optimizer tensors and buffers of a model whose tensors are plain or DTensors.

    Raises:
        EngineError: gradients are pending, or the optimizer cuts its state otherwise than the parameter.
    """
    refuse_pending(_has_gradients(model))
    return _intervals(model, optimizer, world)


def whole_scalars(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Scalar]]:
    """The optimizer's numbers for the parameters this rank holds something of."""
    return {
        name: numbers(name, optimizer.state[parameter])
        for name, parameter in trainable(model)
        if optimizer.state.get(parameter) and (not isinstance(parameter, DTensor) or parameter.to_local().numel())
    }


@contextmanager
def load_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, kept: Mapping[str, OptimizerState] | None
) -> Iterator[Iterator[Interval]]:
    """`Engine.load_state` of such a model; nothing is derived from its tensors.

    Raises:
        EngineError: gradients are pending, or the optimizer cannot keep that.
    """
    refuse_pending(_has_gradients(model))
    if kept is not None:
        _replace_state(optimizer, trainable(model), kept)
    yield _intervals(model, optimizer, world)


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def _replace_state(
    optimizer: torch.optim.Optimizer, named: NamedParameters, kept: Mapping[str, OptimizerState]
) -> None:
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    held = [(name, p) for name, p in named if id(p) in groups]
    check_names(kept, (name for name, _ in held))
    for name, parameter in held:
        for key, (shape, _) in kept[name].tensors.items() if name in kept else ():
            if isinstance(parameter, DTensor) and shape != tuple(parameter.shape):
                raise EngineError(
                    f"{name} is sharded, and its optimizer state {key!r} has the shape {shape} and not the "
                    f"parameter's {tuple(parameter.shape)}: it cannot be cut alike; use a backend that keeps "
                    "parameters whole, as ddp"
                )
    optimizer.state.clear()
    for name, parameter in held:
        if name in kept:
            state: dict[str, Any] = {
                key: _zeros(parameter, shape, dtype) for key, (shape, dtype) in kept[name].tensors.items()
            }
            for key, value in kept[name].scalars.items():
                state[key] = placed(key, value, groups[id(parameter)], parameter.device)
            optimizer.state[parameter] = state


def _zeros(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if shape == tuple(parameter.shape):
        # As torch.optim makes it: with the parameter's memory format, and its placements on a mesh.
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _intervals(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Iterator[Interval]:
    for raw_name, parameter in model.named_parameters():
        yield from pieces("parameter", full_name(raw_name), None, parameter.detach(), world)
    for name, parameter in trainable(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if is_tensor(value):
                if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
                    raise EngineError(
                        f"the optimizer keeps {key!r} for the sharded parameter {name} as a tensor without a place in "
                        "the mesh: no one can tell which part of it a rank holds; use an optimizer of torch.optim"
                    )
                yield from pieces("optimizer", name, key, value.detach(), world)
    for name, buffer in persistent_buffers(model):
        yield from pieces("buffer", name, None, buffer.detach(), world)


def pieces(kind: Kind, name: str, state: str | None, tensor: torch.Tensor, world: World) -> Iterator[Interval]:
    """A plain tensor as one whole interval, a copy a rank; a DTensor as the runs of its block that are contiguous."""
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        local, offset = tensor.to_local(), _offset(tensor.shape, tensor.device_mesh, tensor.placements)
        copy, copies = _copy(tensor)
    else:
        local, offset = tensor, (0,) * len(shape)
        copy, copies = world.rank, world.size
    for index, start in _runs(tuple(local.shape), offset, shape):
        flat, writeback = _flat(local[index])
        yield Interval(
            kind=kind,
            name=name,
            state=state,
            shape=shape,
            start=start,
            tensor=flat,
            copy=copy,
            copies=copies,
            writeback=writeback,
        )


def _flat(piece: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The 1-D row-major view of a tensor, or a copy and what puts it back."""
    if piece.is_contiguous():
        return piece.view(-1), None
    flat = piece.contiguous().view(-1)

    def writeback() -> None:
        piece.copy_(flat.view(piece.shape))

    return flat, writeback


def _runs(
    local: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """(index into the block, element of the whole tensor) of each contiguous run of a block.

    A run spans the last dim that the block does not span whole, and all after it: one for a block of rows.
    """
    if 0 in local:
        # A rank that holds nothing; an empty tensor is one empty run.
        yield from [((), 0)] if 0 in shape else []
        return
    cut = max((dim for dim in range(len(shape)) if local[dim] != shape[dim]), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    corner = sum(o * stride for o, stride in zip(offset, strides, strict=True))
    for index in product(*map(range, local[:cut])):
        yield index, corner + sum(i * stride for i, stride in zip(index, strides, strict=False))


@functools.lru_cache(maxsize=4096)
def _offset(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Where a rank's block of a DTensor begins; kept, because every moment of a parameter is asked for the same."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def _copy(tensor: DTensor) -> tuple[int, int]:
    """Which of the equal copies of its shard this rank holds, and how many there are."""
    copy, copies = 0, 1
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copy, copies = copy * mesh.size(dim) + coordinate[dim], copies * mesh.size(dim)
    return copy, copies
