"""torch's DistributedDataParallel: whole replicas, gradients averaged by all-reduce once a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
from shardkit.engines.options import DdpOptions
from shardkit.engines.traffic import replicas_traffic
from shardkit.engines.unused import refuse_unused
from shardkit.engines.whole import autocast, clipped_step, load_whole, whole_scalars, whole_state


class DdpEngine(Engine):
    """A replica on every rank."""

    Options = DdpOptions
    model: nn.Module

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
        self.model = self.replica = DistributedDataParallel(
            self.bare,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            # shardkit sends buffers once, and merges statistics before evaluation, on every backend alike; DDP would
            # overwrite every rank's with rank 0's before each forward.
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=options.find_unused_parameters,
            bucket_cap_mb=options.bucket_cap_mb,
        )
        self.optimizer = make_optimizer(self.named)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        # The forward has to be inside no_sync too: DDP decides there whether the backward communicates.
        with nullcontext() if last else self.replica.no_sync():
            with autocast(self.settings.precision, self.world.device):
                yield

    @contextmanager
    def inference(self) -> Iterator[None]:
        with torch.no_grad(), autocast(self.settings.precision, self.world.device):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> StepReport:
        if self.traits.unused_parameters == "refused":
            # DDP 2.13 leaves the averaging unfinished when a gradient never comes, and says so a step too late.
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


def replicas_meaning(situation: Situation, options: DdpOptions) -> Meaning:
    """What holds for DistributedDataParallel however it was reached."""
    finds = "parameters without a gradient are looked for: one int32 a parameter is all-reduced too"
    return plain(
        situation,
        averages="DDP, in the all-reduce",
        traffic=replicas_traffic(situation, options),
        least=replicas_traffic(situation, DdpOptions()),
        notes=(finds,) if options.find_unused_parameters else (),
        translated={
            "backend.options.find_unused_parameters": f"find_unused_parameters={options.find_unused_parameters}",
            "backend.options.bucket_cap_mb": f"bucket_cap_mb={options.bucket_cap_mb}",
        },
    )
