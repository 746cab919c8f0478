"""What must hold before a backend wraps a model: rank 0's weights everywhere, and no parameter it cannot cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardkit.errors import BackendError
from shardkit.world import World

NOTHING_TRAINED = "the model has no parameter that requires a gradient; nothing can be trained"


@torch.no_grad()
def same_start(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's parameters and buffers; only DistributedDataParallel would do both (torch 2.13).

    Raises:
        BackendError: the ranks built different models.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    for rank, others in enumerate(world.gather(shapes)):
        if others != shapes:
            mine, theirs = next((pair for pair in zip_longest(shapes, others) if pair[0] != pair[1]), ((), ()))
            raise BackendError(
                f"the model is not the same on all ranks: rank {world.rank} built {_shown(mine)}, rank {rank} "
                f"{_shown(theirs)}; every rank must build the same model"
            )
    for _, tensor in named:
        world.broadcast(tensor.data)


def _shown(entry: tuple[Any, ...] | None) -> str:
    return f"{entry[0]} {entry[1]} {entry[2]}" if entry else "nothing there"


def take_inputs_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Have `model` cast the floating-point tensors it is called with, as its parameters are of that dtype.

    Inside tuples, lists and mappings; targets, which go past the model, stay as they are.
    """

    def cast(_model: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any]:
        return tree_map(lambda x: x.to(dtype) if _is_floating(x) else x, (arguments, named))

    model.register_forward_pre_hook(cast, with_kwargs=True)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def check_parameters(model: nn.Module, dtypes: Sequence[torch.dtype] = ()) -> None:
    """Refuse by name the parameters that a sharding backend cannot cut.

    Args:
        model: before it is wrapped.
        dtypes: those the backend takes; empty = any real one.

    Raises:
        BackendError: names them and says what to do.
    """
    complaints = []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            complaints.append(f"{name} has no dimension: give it the shape [1]")
        elif not parameter.is_contiguous():
            complaints.append(f"{name} is not contiguous in memory: call .contiguous() on it (channels_last too)")
        elif parameter.is_complex():
            complaints.append(f"{name} is complex: keep its real and imaginary parts as real parameters")
        elif dtypes and parameter.dtype not in dtypes:
            complaints.append(f"{name} is {parameter.dtype}: call model.float() first")
    if complaints:
        raise BackendError("this backend cannot shard the model: " + "; ".join(complaints[:5]))
