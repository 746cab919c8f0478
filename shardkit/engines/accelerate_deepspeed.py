"""DeepSpeed ZeRO as Accelerate sets it up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch import nn

from shardkit.engines.accelerator import reset_accelerate, start_accelerator
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
from shardkit.engines.footprint import Footprint, Part, Workload
from shardkit.engines.meaning import Meaning, Situation
from shardkit.engines.names import trainable
from shardkit.engines.options import DeepSpeedOptions
from shardkit.engines.partitions import Partitions
from shardkit.engines.start import check_parameters
from shardkit.engines.unused import UnusedWatch
from shardkit.engines.whole import autocast
from shardkit.engines.zero import (
    OutputWatch,
    close_zero,
    prepare_deepspeed,
    put_in_place,
    settled,
    zero_config,
    zero_meaning,
    zero_step,
    zero_traits,
)
from shardkit.engines.zero_footprint import zero_footprint


class AccelerateDeepSpeedEngine(Engine):
    """Accelerator.prepare with a DeepSpeed plugin; its backward would also step, so DeepSpeed's own is called."""

    Options = DeepSpeedOptions

    @classmethod
    def describe(cls, options: DeepSpeedOptions) -> Traits:
        return zero_traits(options)

    @classmethod
    def explain(cls, options: DeepSpeedOptions, situation: Situation) -> Meaning:
        return zero_meaning(situation, options)

    @classmethod
    def footprint(cls, options: DeepSpeedOptions, situation: Situation, workload: Workload) -> Footprint:
        return zero_footprint(situation, workload, options)

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, settings: EngineSettings, options: DeepSpeedOptions
    ) -> None:
        self.traits = self.describe(options)
        self.world = settings.world
        self.settings = settings
        check_parameters(model, [torch.float32])
        options = settled(options, model, settings)
        prepare_deepspeed()
        named = trainable(model)
        self.optimizer = make_optimizer(named)
        self.unused = UnusedWatch(self.optimizer, named)
        self.outputs = OutputWatch(model, options.stage)
        config = zero_config(settings, options)
        put_in_place(model, settings, config)
        self.accelerator = start_accelerator(
            self.world,
            {DistributedType.DEEPSPEED},
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False),
        )
        prepared: tuple[Any, Any] = self.accelerator.prepare(model, self.optimizer)
        self.model: Any = prepared[0]
        self.partitions = Partitions(engine=self.model, model=model, world=self.world, unused=self.unused)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        # Before the forward: the hooks of the coming backward read it (DeepSpeed 0.19.8).
        self.model.set_gradient_accumulation_boundary(last)
        with autocast(self.settings.precision, self.world.device):
            yield

    @contextmanager
    def inference(self) -> Iterator[None]:
        with torch.no_grad(), autocast(self.settings.precision, self.world.device):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        # scale_wrt_gas=False: the loss is in its final scale.
        self.model.backward(loss, scale_wrt_gas=False)

    def step(self) -> StepReport:
        self.outputs.stop()
        self.unused.check()
        return zero_step(self.model)

    def state(self) -> Iterator[Interval]:
        return self.partitions.state()

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        return self.partitions.scalars()

    def load_state(self, optimizer: Mapping[str, OptimizerState] | None) -> AbstractContextManager[Iterable[Interval]]:
        return self.partitions.load(optimizer)

    def held(self) -> Iterator[tuple[Part, torch.Tensor]]:
        return self.partitions.held()

    def close(self) -> None:
        close_zero(self.model)
        reset_accelerate()
