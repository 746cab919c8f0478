"""A recipe as adapters are told of it: its traced micro-step, and what its optimizer needs for any tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import default_collate

from shardkit.data.loader import num_items
from shardkit.engines.footprint import OptimizerNeeds, Piece, Trace
from shardkit.losses import Loss, adapt
from shardkit.memory import Lifetimes
from shardkit.optimizer import grouped
from shardkit.planning.trace import trace
from shardkit.recipe.build import build
from shardkit.recipe.schema import Recipe


@dataclass(kw_only=True)
class RecipeWorkload:
    """One micro-batch size of a recipe; see `shardkit.engines.footprint.Workload`."""

    recipe: Recipe
    model: nn.Module
    # Bare, after the normalization policy.
    units: tuple[str, ...]
    batch: Any
    # On the CPU.
    sizes: tuple[int, ...] = ()
    # Of a joined window: the items of each of its micro-batches.
    rank: int = 0
    device: str = "cpu"
    _traces: dict[torch.dtype, Trace] = field(default_factory=dict)
    _needs: dict[tuple[Piece, ...], OptimizerNeeds] = field(default_factory=dict)

    @property
    def buffers(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.model.buffers())

    def trace(self, stored: torch.dtype) -> Trace:
        if stored not in self._traces:
            self._traces[stored] = trace(
                self.model,
                self.batch,
                self.loss,
                precision=self.recipe.train.precision,
                stored=stored,
                sizes=self.sizes,
            )
        return self._traces[stored]

    def optimizer(self, pieces: Sequence[Piece]) -> OptimizerNeeds:
        key = tuple(pieces)
        if key not in self._needs:
            self._needs[key] = optimizer_needs(self.recipe, pieces, self.device)
        return self._needs[key]

    @property
    def loss(self) -> Loss:
        return adapt(build(self.recipe.loss))

    def on(self, rank: int) -> RecipeWorkload:
        """The same of another rank; what has been traced is shared."""
        return replace(self, rank=rank)


def optimizer_needs(recipe: Recipe, pieces: Sequence[Piece], device: str = "cpu") -> OptimizerNeeds:
    """Let the recipe's optimizer step twice on fake tensors of these shapes.

    Raises:
        Exception: whatever an optimizer raises that looks at its numbers.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Lifetimes(device) as alive:
        named = [
            (piece.name, nn.Parameter(torch.empty(piece.shape, dtype=piece.dtype, device=device))) for piece in pieces
        ]
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


def sample(recipe: Recipe, count: int) -> Any:
    """A batch of the recipe's own first items, again and again where there are fewer."""
    items = build(recipe.data.train)
    collate = build(recipe.data.collate) if recipe.data.collate is not None else default_collate
    number = num_items(items)
    return collate([items[index % number] for index in range(count)])
