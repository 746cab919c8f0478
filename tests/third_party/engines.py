"""Two engines a third party might write: one that is right, and one that forgets what averaging does to the scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit import Engine, StepReport, Traits
from shardkit.engines.api import EngineSettings, Interval, MakeOptimizer, OptimizerState, Scalar
from shardkit.engines.names import trainable
from shardkit.engines.whole import autocast, clipped_step, load_whole, whole_scalars, whole_state


@dataclass
class ManualOptions:
    """Nothing to set."""


class ManualEngine(Engine):
    """Replicas whose gradients are all-reduced by hand at the step."""

    Options = ManualOptions

    @classmethod
    def describe(cls, options: ManualOptions) -> Traits:
        return Traits(unused_parameters="kept")

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, settings: EngineSettings, options: ManualOptions
    ) -> None:
        self.traits = self.describe(options)
        self.world, self.settings = settings.world, settings
        self.model = model.to(settings.world.device)
        if settings.precision == "bf16-true":
            self.model.to(torch.bfloat16)
        self.named = trainable(self.model)
        self.optimizer = make_optimizer(self.named)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        with autocast(self.settings.precision, self.world.device):
            yield

    @contextmanager
    def inference(self) -> Iterator[None]:
        with torch.no_grad(), autocast(self.settings.precision, self.world.device):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.world.sum(gradient) / self.world.size

    def step(self) -> StepReport:
        for _, parameter in self.named:
            if parameter.grad is not None:
                parameter.grad = self.reduced(parameter.grad)
        return clipped_step(self.optimizer, [p for _, p in self.named], self.settings.max_grad_norm)

    def state(self) -> Iterator[Interval]:
        return whole_state(self.model, self.optimizer, self.world)

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        return whole_scalars(self.model, self.optimizer)

    def load_state(self, optimizer: Mapping[str, OptimizerState] | None) -> AbstractContextManager[Iterable[Interval]]:
        return load_whole(self.model, self.optimizer, self.world, optimizer)

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


class SummingEngine(ManualEngine):
    """Sums over the ranks where the interface says average: gradients are world_size times too large."""

    def reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.world.sum(gradient)


class NoEngine:
    """Has none of the members."""

    def __init__(self, *arguments: Any) -> None: ...
