"""One process, plain torch: the reference every other engine is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from shardkit.engines.api import (
    Engine,
    EngineSettings,
    Interval,
    MakeOptimizer,
    OptimizerState,
    Scalar,
    StepReport,
    Traits,
)
from shardkit.engines.footprint import Footprint, Workload
from shardkit.engines.footprints import replicas_footprint
from shardkit.engines.meaning import Meaning, Situation, plain
from shardkit.engines.names import trainable
from shardkit.engines.options import SingleOptions
from shardkit.engines.whole import autocast, clipped_step, load_whole, whole_scalars, whole_state


class SingleEngine(Engine):
    """The model as it is, on one device."""

    Options = SingleOptions

    @classmethod
    def describe(cls, options: SingleOptions) -> Traits:
        return Traits(reduces="nothing", max_world_size=1, needs_process_group=False)

    @classmethod
    def explain(cls, options: SingleOptions, situation: Situation) -> Meaning:
        return plain(situation, traffic={}, least={})

    @classmethod
    def footprint(cls, options: SingleOptions, situation: Situation, workload: Workload) -> Footprint:
        return replicas_footprint(situation, workload, buckets=False)

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, settings: EngineSettings, options: SingleOptions
    ) -> None:
        self.traits = self.describe(options)
        self.world = settings.world
        self.settings = settings
        self.model = model.to(settings.world.device)
        if settings.precision == "bf16-true":
            self.model.to(torch.bfloat16)
        named = trainable(self.model)
        self.parameters = [parameter for _, parameter in named]
        self.optimizer = make_optimizer(named)

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

    def step(self) -> StepReport:
        return clipped_step(self.optimizer, self.parameters, self.settings.max_grad_norm)

    def state(self) -> Iterator[Interval]:
        return whole_state(self.model, self.optimizer, self.world)

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        return whole_scalars(self.model, self.optimizer)

    def load_state(self, optimizer: Mapping[str, OptimizerState] | None) -> AbstractContextManager[Iterable[Interval]]:
        return load_whole(self.model, self.optimizer, self.world, optimizer)

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
