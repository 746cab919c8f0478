"""fully_shard (FSDP2) as Accelerate sets it up, which it does on accelerators only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import ClassVar, cast

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit.engines.accelerator import checked_accelerator, refuse_second, reset_accelerate
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
from shardkit.engines.footprints import fully_shard_footprint
from shardkit.engines.fsdp2 import check_dtypes, fsdp2_meaning, fsdp2_traits, mixed_precision, reshard, shard_norms
from shardkit.engines.kept import refuse_pending
from shardkit.engines.meaning import Meaning, Situation
from shardkit.engines.names import trainable
from shardkit.engines.options import AccelerateFsdp2Options
from shardkit.engines.start import check_parameters
from shardkit.engines.traffic import fully_shard_traffic
from shardkit.engines.units import find_units
from shardkit.engines.whole import autocast, clipped_step, load_whole, whole_scalars, whole_state
from shardkit.errors import EngineError


class AccelerateFsdp2Engine(Engine):
    """Accelerator.prepare with a version 2 plugin."""

    Options = AccelerateFsdp2Options
    force_cpu: ClassVar[bool] = False
    # For the conformance suite: tell Accelerate that gloo ranks are GPUs, so that its FSDP2 path runs on a CPU.

    @classmethod
    def describe(cls, options: AccelerateFsdp2Options) -> Traits:
        if cls.force_cpu:
            return fsdp2_traits(options)
        return replace(
            fsdp2_traits(options),
            devices=frozenset({"cuda"}),
            refusals={
                "cpu": "Accelerate 1.15 does not shard on a CPU (it would do plain DDP, or train unconnected "
                "copies, without a word); use backend=fsdp2, which runs the same fully_shard on gloo"
            },
        )

    @classmethod
    def explain(cls, options: AccelerateFsdp2Options, situation: Situation) -> Meaning:
        return replace(fsdp2_meaning(situation, options), traffic=fully_shard_traffic(situation, options))

    @classmethod
    def footprint(cls, options: AccelerateFsdp2Options, situation: Situation, workload: Workload) -> Footprint:
        found = fully_shard_footprint(
            situation,
            workload,
            reshard_after_forward=options.reshard_after_forward,
            shards=situation.world_size,
            cpu_offload=options.cpu_offload,
            reduce_each_micro_step=options.reduce_each_micro_step,
        )
        # Accelerate 1.15 holds the whole parameters until all of them are shards.
        whole = sum(weight.numel for weight in situation.anatomy.weights) * situation.stored.itemsize
        loading = found.buffers + whole + found.parameters
        return found if options.cpu_offload else replace(found, loading=loading)

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        settings: EngineSettings,
        options: AccelerateFsdp2Options,
    ) -> None:
        self.traits = self.describe(options)
        # Gradients of an unfinished window, which fully_shard keeps where `.grad` does not show them.
        self.pending = False
        self.world = settings.world
        self.settings, self.options = settings, options
        check_parameters(model)
        if settings.precision == "bf16-true":
            model.to(torch.bfloat16)
        model.to(self.world.device)
        units = {type(unit).__name__ for _, unit in find_units(model, settings.blocks)}
        # Over the mesh that Accelerate lets fully_shard make: the norm of all gradients wants one mesh.
        shard_norms(model, settings, None, options.cpu_offload)
        check_dtypes(model, find_units(model, settings.blocks))
        # Accelerate wants the optimizer first and exchanges its parameters for the shards.
        optimizer = make_optimizer(trainable(model))
        refuse_second()
        PartialState(cpu=self.world.device.type == "cpu")
        if self.force_cpu:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self.accelerator = checked_accelerator(
            {DistributedType.FSDP},
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=options.reshard_after_forward,
                auto_wrap_policy="transformer_based_wrap" if units else "no_wrap",
                transformer_cls_names_to_wrap=sorted(units) or None,
                cpu_offload=options.cpu_offload,
                cpu_ram_efficient_loading=False,
                mixed_precision_policy=mixed_precision(settings.precision),
            ),
        )
        self.model, prepared = self.accelerator.prepare(model, optimizer)
        self.optimizer = prepared.optimizer
        self.named = trainable(self.model)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if not isinstance(self.model, FSDPModule) or held != {id(p) for _, p in self.named}:
            raise EngineError("Accelerate did not shard the model, or left the optimizer with other parameters")

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        cast(FSDPModule, self.model).set_requires_gradient_sync(last or self.options.reduce_each_micro_step)
        with autocast(self.settings.precision, self.world.device):
            yield

    @contextmanager
    def inference(self) -> Iterator[None]:
        with torch.no_grad(), autocast(self.settings.precision, self.world.device):
            yield
        reshard(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        self.pending = True
        # Divides by its accumulation steps, which are 1.
        self.accelerator.backward(loss)

    def step(self) -> StepReport:
        report = clipped_step(self.optimizer, [p for _, p in self.named], self.settings.max_grad_norm)
        self.pending = False
        return report

    def state(self) -> Iterator[Interval]:
        refuse_pending(self.pending)
        reshard(self.model)
        return whole_state(self.model, self.optimizer, self.world)

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        reshard(self.model)
        return whole_scalars(self.model, self.optimizer)

    def load_state(self, optimizer: Mapping[str, OptimizerState] | None) -> AbstractContextManager[Iterable[Interval]]:
        refuse_pending(self.pending)
        reshard(self.model)
        return load_whole(self.model, self.optimizer, self.world, optimizer)

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        reset_accelerate()
