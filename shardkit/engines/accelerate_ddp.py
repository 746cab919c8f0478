"""DistributedDataParallel as Accelerate sets it up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
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
from shardkit.engines.ddp import replicas_meaning
from shardkit.engines.footprint import Footprint, Workload
from shardkit.engines.footprints import replicas_footprint
from shardkit.engines.meaning import Meaning, Situation
from shardkit.engines.names import trainable
from shardkit.engines.options import DdpOptions
from shardkit.engines.unused import refuse_unused
from shardkit.engines.whole import autocast, clipped_step, load_whole, whole_scalars, whole_state

# NO: one process, which Accelerate does not wrap.
EXPECTED = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


class AccelerateDdpEngine(Engine):
    """Accelerator.prepare over replicas."""

    Options = DdpOptions

    @classmethod
    def describe(cls, options: DdpOptions) -> Traits:
        return Traits(unused_parameters="kept" if options.find_unused_parameters else "refused")

    @classmethod
    def explain(cls, options: DdpOptions, situation: Situation) -> Meaning:
        return replicas_meaning(situation, options)

    @classmethod
    def footprint(cls, options: DdpOptions, situation: Situation, workload: Workload) -> Footprint:
        return replicas_footprint(situation, workload, buckets=True)

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, settings: EngineSettings, options: DdpOptions
    ) -> None:
        self.traits = self.describe(options)
        self.world = settings.world
        self.settings = settings
        self.bare = model.to(settings.world.device)
        if settings.precision == "bf16-true":
            self.bare.to(torch.bfloat16)
        self.named = trainable(self.bare)
        # The optimizer is not prepared: Accelerate's wrapper would decide by itself whether a step is one.
        self.optimizer = make_optimizer(self.named)
        expected = EXPECTED - ({DistributedType.NO} if self.world.size > 1 else set())
        self.accelerator = start_accelerator(
            self.world,
            expected,
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=options.find_unused_parameters,
                    bucket_cap_mb=cast(int, options.bucket_cap_mb),
                )
            ],
        )
        self.model = self.accelerator.prepare_model(self.bare, device_placement=False)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            with autocast(self.settings.precision, self.world.device):
                yield

    @contextmanager
    def inference(self) -> Iterator[None]:
        with torch.no_grad(), autocast(self.settings.precision, self.world.device):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        # Divides by its accumulation steps, which are 1.
        self.accelerator.backward(loss)

    def step(self) -> StepReport:
        if self.traits.unused_parameters == "refused":
            refuse_unused(
                [name for name, p in self.named if p.grad is None],
                "backend.options.find_unused_parameters=true (costs a walk over the graph a step)",
            )
        return clipped_step(self.optimizer, [p for _, p in self.named], self.settings.max_grad_norm)

    def state(self) -> Iterator[Interval]:
        return whole_state(self.bare, self.optimizer, self.world)

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        return whole_scalars(self.bare, self.optimizer)

    def load_state(self, optimizer: Mapping[str, OptimizerState] | None) -> AbstractContextManager[Iterable[Interval]]:
        return load_whole(self.bare, self.optimizer, self.world, optimizer)

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        reset_accelerate()
