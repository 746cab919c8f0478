"""What is examined: the bare model of a recipe, its loss, and one logical batch cut as the recipe cuts it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardkit.data.loader import Windows, num_items
from shardkit.data.order import GlobalOrder
from shardkit.engines.api import Engine, NamedParameters, Precision, StepReport
from shardkit.engines.opening import open_engine
from shardkit.engines.single import SingleEngine
from shardkit.errors import DataError, WindowError
from shardkit.losses import Loss, adapt
from shardkit.losses.adapting import num_rows
from shardkit.recipe.build import build
from shardkit.recipe.schema import ActivationCheckpointing, Normalization, Recipe
from shardkit.seeds import seed_alike
from shardkit.window import join_batches
from shardkit.world import World


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and one logical batch for it; nothing here is changed by an examination."""

    model: nn.Module
    # Bare, on any device: copies of it are what runs.
    loss: Loss
    ranks: list[list[Any]]
    # The micro-batches of each rank in the order of its micro-steps; on `device`.
    normalization: Normalization
    micro_batch_size: int
    device: torch.device
    precision: Precision = "fp32"
    blocks: tuple[str, ...] = ()
    activation_checkpointing: ActivationCheckpointing = "none"

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def accumulation(self) -> int:
        return max(map(len, self.ranks))

    @property
    def items(self) -> int:
        """Of the logical batch, over all ranks."""
        return sum(map(num_rows, self.micro_batches()))

    def micro_batches(self) -> list[Any]:
        """All of them, by micro-step and then by rank: the items in the order of the data."""
        steps = range(self.accumulation)
        return [batches[step] for step in steps for batches in self.ranks if step < len(batches)]

    def joined(self, batches: list[Any]) -> Any:
        """Micro-batches as one.

        Raises:
            DataError: they cannot be concatenated, so that there is no large batch to compare with.
        """
        try:
            return join_batches(batches)
        except WindowError as error:
            raise DataError(f"there is no one large batch to compare with: {error}") from error


class StillEngine(SingleEngine):
    """One process, and no step: a window runs forward and backward, and the weights stay."""

    def step(self) -> StepReport:
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(grad_norm=0.0, skipped=False)


def prepare(recipe: Recipe, *, world_size: int, device: torch.device) -> Subject:
    """Build the recipe's model and loss, and read one logical batch of its train data.

    Raises:
        DataError: the data set has no items, or is not map-style.
    """
    with untouched_streams(device):
        seed_alike(recipe.seed)
        model = build(recipe.model)
        items = build(recipe.data.train)
        batch, data = recipe.batch, recipe.data
        order = GlobalOrder(
            num_items=num_items(items),
            global_batch_size=min(batch.global_batch_size, num_items(items)),
            seed=recipe.seed,
            shuffle=data.shuffle,
        )
        collate = build(data.collate) if data.collate is not None else None
        ranks = []
        for rank in range(world_size):
            windows = Windows(
                items,
                order=order,
                world_size=world_size,
                rank=rank,
                micro_batch_size=batch.micro_batch_size,
                collate=collate,
                device=device,
                seed=recipe.seed,
            )
            window = next(windows.epoch(0))
            ranks.append([micro_batch.batch for micro_batch in window if not micro_batch.filler])
        # fp16 needs a loss scaler, which no examination has; bf16 takes as many bytes.
        precision: Precision = "bf16-mixed" if recipe.train.precision == "fp16-mixed" else recipe.train.precision
        return Subject(
            model=model,
            loss=adapt(build(recipe.loss)),
            ranks=ranks,
            normalization=recipe.normalization,
            micro_batch_size=batch.micro_batch_size,
            device=device,
            precision=precision,
            blocks=tuple(recipe.blocks),
            activation_checkpointing=recipe.activation_checkpointing,
        )


def open_copy(subject: Subject, normalization: Normalization, accumulation: int) -> Engine:
    """A copy of the model under a policy, in training, whose steps change no weight.

    Raises:
        NormalizationError: a layer would lose something under the policy.
    """
    engine = open_engine(
        {"name": "doctor", "adapter": f"{StillEngine.__module__}:{StillEngine.__name__}"},
        copy.deepcopy(subject.model),
        _still,
        world=World(device=subject.device),
        precision=subject.precision,
        blocks=subject.blocks,
        activation_checkpointing=subject.activation_checkpointing,
        normalization=normalization,
        micro_batch_size=subject.micro_batch_size,
        gradient_accumulation_steps=accumulation,
    )
    engine.model.train()
    return engine


def _still(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


@contextmanager
def untouched_streams(device: torch.device) -> Iterator[None]:
    """Random streams (torch, numpy, random) start at a fixed place inside, and are what they were afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
