"""What a recipe's optimizer keeps, and needs for a moment: it steps on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardkit.engines.footprint import OptimizerNeeds, Piece
from shardkit.memory import Lifetimes
from shardkit.optimizer import grouped
from shardkit.recipe.build import build
from shardkit.recipe.schema import Recipe


def optimizer_needs(recipe: Recipe, pieces: Sequence[Piece], device: str = "cpu") -> OptimizerNeeds:
    """Let the recipe's optimizer step twice on fake tensors of these shapes on a kind of device.

    Raises:
        Exception: whatever an optimizer raises that looks at its numbers.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), Lifetimes(device) as alive:
        made = [torch.empty(piece.shape, dtype=piece.dtype, device=device) for piece in pieces]
        named = [(piece.name, nn.Parameter(tensor)) for piece, tensor in zip(pieces, made, strict=True)]
        alive.see([parameter for _, parameter in named])
        optimizer: torch.optim.Optimizer = build(recipe.optimizer, grouped(named, recipe.parameter_groups))
        _as_on(optimizer, device)
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter)
        before = alive.current
        optimizer.step()
        state = alive.current - before
        alive.peak = alive.current
        optimizer.step()
        return OptimizerNeeds(state=state, temporary=alive.peak - alive.current)


def _as_on(optimizer: torch.optim.Optimizer, device: str) -> None:
    """torch takes `foreach` by default where parameters are on an accelerator, and does not see it in fake ones."""
    for group in optimizer.param_groups:
        if device != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
