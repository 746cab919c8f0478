"""A recipe's model for planning: built once on the meta device, traced once a micro-batch size, for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from shardkit.engines.activations import recompute, recomputed_blocks
from shardkit.engines.anatomy import Anatomy, anatomy
from shardkit.engines.footprint import Event, OptimizerNeeds, Piece, Trace
from shardkit.engines.start import NOTHING_TRAINED, take_inputs_as
from shardkit.engines.units import find_units
from shardkit.errors import BackendError
from shardkit.losses import Loss, adapt
from shardkit.planning.optimizing import optimizer_needs
from shardkit.planning.sample import Sample
from shardkit.planning.trace import trace
from shardkit.recipe.build import build
from shardkit.recipe.load import Loaded
from shardkit.recipe.schema import Recipe
from shardkit.subject import Bare, bare_model, optimizer_groups


class PlannedModel:
    """What is the same for all backends. Anything that cannot be traced says why, once.

    Args:
        loaded: the recipe.
        device: kind of device to plan for, "cuda" or "cpu": which implementation an optimizer takes.
        activation_checkpointing: over the recipe's.
        beside: the same model without; what it has found of the data and the optimizer is not looked for again.

    Raises:
        RequestError: the model cannot be built, the policy cannot be applied, or no blocks are found to recompute.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        device: str = "cpu",
        activation_checkpointing: str | int | None = None,
        beside: PlannedModel | None = None,
    ) -> None:
        recipe = loaded.recipe
        if activation_checkpointing is not None:
            recipe = replace(recipe, activation_checkpointing=activation_checkpointing)
        self.recipe, self.device = recipe, device
        # Policy auto is taken as for several ranks and micro-batches.
        self.bare: Bare = bare_model(loaded, world_size=2, accumulation=2)
        model = self.bare.model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise BackendError(NOTHING_TRAINED)
        if recipe.train.precision == "bf16-true":
            take_inputs_as(model, torch.bfloat16)
        blocks = recomputed_blocks(model, recipe.normalization, recipe.blocks, recipe.activation_checkpointing)
        groups = optimizer_groups(model, recipe)
        self.anatomy: Anatomy = anatomy(model, recipe.blocks, groups, [block for block, _ in blocks])
        self.units = tuple(name for name, _ in find_units(model, recipe.blocks))
        recompute(blocks)
        self.joined = any(layer.mode == "exact" for layer in self.bare.applied.layers)
        self.built = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        # Bytes of the parameters as they are made.
        self.buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        self._data: Sample = beside._data if beside else Sample(recipe)
        self._traces: dict[tuple[int, int, torch.dtype], Trace] = {}
        self._needs: dict[tuple[Piece, ...], OptimizerNeeds] = beside._needs if beside else {}

    def workload(self, micro_batch_size: int, accumulation: int, rank: int = 0) -> PlannedWorkload:
        """What adapters are told of it; `shardkit.engines.footprint.Workload`.

        Args:
            micro_batch_size: items of a forward.
            accumulation: micro-batches of a window; policy exact runs them as one.
            rank: whose footprint it is.
        """
        joined = accumulation if self.joined else 1
        return PlannedWorkload(model=self, micro_batch_size=micro_batch_size, joined=joined, rank=rank)

    @cached_property
    def loss(self) -> Loss:
        return adapt(build(self.recipe.loss))

    def traced(self, micro_batch_size: int, joined: int, stored: torch.dtype) -> Trace:
        """A micro-step on the recipe's own first items.

        Raises:
            Exception: whatever the data, the model or the loss raises on fake tensors.
        """
        recurrent = next((n for n, m in self.bare.model.named_modules() if isinstance(m, nn.RNNBase)), None)
        if recurrent is not None:
            raise BackendError(
                f"{recurrent or 'the model'!r} is a recurrent layer of torch, whose kernels keep workspaces that no "
                "trace sees (60 % of a peak was missing); `--measure` runs it"
            )
        key = (micro_batch_size, joined, stored)
        if key not in self._traces:
            self._traces[key] = trace(
                self.bare.model,
                self._data.batch(micro_batch_size * joined),
                self.loss,
                precision=self.recipe.train.precision,
                stored=stored,
                sizes=(micro_batch_size,) * joined if self.joined else (),
            )
        return self._traces[key]

    def needs(self, pieces: Sequence[Piece]) -> OptimizerNeeds:
        key = tuple(pieces)
        if key not in self._needs:
            self._needs[key] = optimizer_needs(self.recipe, pieces, self.device)
        return self._needs[key]


@dataclass(frozen=True, kw_only=True)
class PlannedWorkload:
    """One micro-batch size of a planned model."""

    model: PlannedModel
    micro_batch_size: int
    joined: int = 1
    rank: int = 0
    between: tuple[int, int] | None = None
    # Micro-batch sizes that are traced instead, where this one's trace is on the line through theirs.

    @property
    def recipe(self) -> Recipe:
        return self.model.recipe

    @property
    def buffers(self) -> int:
        return self.model.buffers

    @property
    def moved(self) -> bool:
        return self.model.device != "cpu"

    @property
    def units(self) -> tuple[str, ...]:
        return self.model.units

    def trace(self, stored: torch.dtype) -> Trace:
        if self.between is None:
            return self.model.traced(self.micro_batch_size, self.joined, stored)
        low, high = (self.model.traced(size, self.joined, stored) for size in self.between)
        part = (self.micro_batch_size - self.between[0]) / (self.between[1] - self.between[0])
        return on_the_line(low, high, part)

    def optimizer(self, pieces: Sequence[Piece]) -> OptimizerNeeds:
        return self.model.needs(pieces)


def on_the_line(low: Trace, high: Trace, part: float) -> Trace:
    """The trace `part` of the way from one to another (beyond it for more than 1): activations grow with the batch.

    Event by event where both have the same ones, which they have unless the model asks for its batch's size.
    """

    def between(a: int, b: int) -> int:
        return max(0, round(a + part * (b - a)))

    same = len(low.events) == len(high.events)
    pairs = zip(low.events, high.events, strict=True) if same else zip(high.events, high.events, strict=True)
    factor = 1.0 if same else between(low.peak, high.peak) / max(1, high.peak)
    return Trace(
        events=tuple(
            Event(b.what, b.name, round(factor * between(a.high, b.high)), round(factor * between(a.level, b.level)))
            for a, b in pairs
        ),
        inputs=between(low.inputs, high.inputs),
        flops=between(low.flops, high.flops),
    )
