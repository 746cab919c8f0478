"""What must hold before a backend wraps a model: rank 0's weights everywhere, and no parameter it cannot cut."""

from __future__ import annotations

import torch
from torch import nn

from shardkit.errors import BackendError
from shardkit.world import World


@torch.no_grad()
def same_start(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's parameters and buffers; only DistributedDataParallel would do both (torch 2.13)."""
    for tensor in (*model.parameters(), *model.buffers()):
        world.broadcast(tensor.data)


def check_parameters(model: nn.Module) -> None:
    """Refuse parameters without a dimension, which no sharding backend can cut.

    Raises:
        BackendError: names them.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if names:
        raise BackendError(
            f"parameters without a dimension cannot be sharded: {', '.join(names)}; give them the shape [1]"
        )
