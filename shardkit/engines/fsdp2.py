"""torch's fully_shard (FSDP2): parameters, gradients and optimizer state in row shards, gathered a unit at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.engines.api import (
    Engine,
    EngineSettings,
    Interval,
    MakeOptimizer,
    OptimizerState,
    Precision,
    Scalar,
    StepReport,
    Traits,
)
from shardkit.engines.footprint import Footprint, Workload
from shardkit.engines.footprints import fully_shard_footprint
from shardkit.engines.kept import refuse_pending
from shardkit.engines.meaning import NONE, Meaning, Situation, plain, short
from shardkit.engines.names import trainable
from shardkit.engines.options import AccelerateFsdp2Options, Fsdp2Options
from shardkit.engines.start import check_parameters
from shardkit.engines.traffic import fully_shard_least, fully_shard_traffic
from shardkit.engines.units import find_units
from shardkit.engines.whole import autocast, clipped_step, load_whole, whole_scalars, whole_state
from shardkit.errors import BackendError
from shardkit.normalization.batch_norm import BatchNorm
from shardkit.world import World


class Fsdp2Engine(Engine):
    """Units of the model under fully_shard, the root last."""

    Options = Fsdp2Options

    @classmethod
    def describe(cls, options: Fsdp2Options) -> Traits:
        return replace(fsdp2_traits(options), world_multiple=options.replicas, offloads=options.cpu_offload)

    @classmethod
    def explain(cls, options: Fsdp2Options, situation: Situation) -> Meaning:
        meaning = fsdp2_meaning(situation, options)
        traffic = fully_shard_traffic(situation, options, replicas=options.replicas)
        placed = f"a mesh of {options.replicas} replicas x {situation.world_size // options.replicas} shards"
        return replace(meaning, traffic=traffic, translated={**meaning.translated, "backend.options.replicas": placed})

    @classmethod
    def footprint(cls, options: Fsdp2Options, situation: Situation, workload: Workload) -> Footprint:
        return fully_shard_footprint(
            situation,
            workload,
            reshard_after_forward=options.reshard_after_forward,
            shards=situation.world_size // options.replicas,
            cpu_offload=options.cpu_offload,
            reduce_each_micro_step=options.reduce_each_micro_step,
        )

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, settings: EngineSettings, options: Fsdp2Options
    ) -> None:
        self.traits = self.describe(options)
        # Gradients of an unfinished window, which fully_shard keeps where `.grad` does not show them.
        self.pending = False
        self.world = settings.world
        self.settings, self.options = settings, options
        check_parameters(model)
        # fully_shard moves a unit at a time: the whole model is never on the device.
        self.model = model
        if settings.precision == "bf16-true":
            self.model.to(torch.bfloat16)
        shard(self.model, settings, options)
        # After fully_shard: an optimizer built before it holds tensors that nothing trains any more.
        self.named = trainable(self.model)
        self.optimizer = make_optimizer(self.named)

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
        loss.backward()

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


def fsdp2_traits(options: Fsdp2Options | AccelerateFsdp2Options) -> Traits:
    """What holds for fully_shard however it was reached."""
    return Traits(
        reduces="each micro-step" if options.reduce_each_micro_step else "once a window",
        shards=frozenset({"parameters", "gradients", "optimizer"}),
        # Row and column statistics (Adafactor) and index_put_ (Rprop) do not work on DTensors in torch 2.13.
        refused_optimizers=frozenset({"Adafactor", "Rprop"}),
    )


def fsdp2_meaning(situation: Situation, options: Fsdp2Options | AccelerateFsdp2Options) -> Meaning:
    """What holds for fully_shard however it was reached, but for what is communicated."""
    notes = ["each parameter's rows are padded to a multiple of the shards", "one norm a parameter is all-reduced"]
    if not options.reshard_after_forward:
        notes.append("parameters stay gathered between forward and backward: half the all-gathers, more memory")
    else:
        notes.append("what lies in no unit stays gathered between forward and backward")
    return plain(
        situation,
        gather=short(situation.computed) if situation.world_size > 1 else NONE,
        reduce=short(situation.stored) if situation.world_size > 1 else NONE,
        masters=f"{short(situation.stored)} shards, the parameters themselves",
        averages="fully_shard, in the reduce-scatter",
        least=fully_shard_least(situation, options, replicas=getattr(options, "replicas", 1)),
        notes=tuple(notes),
        translated={
            "train.precision": "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32) and autocast"
            if situation.precision == "bf16-mixed"
            else f"parameters in {short(situation.stored)}",
            "blocks": "one fully_shard a block" if situation.anatomy.units else "fully_shard of the whole model",
            "backend.options.reshard_after_forward": f"reshard_after_forward={options.reshard_after_forward}",
            "backend.options.cpu_offload": "CPUOffloadPolicy" if options.cpu_offload else "no offload",
            "backend.options.reduce_each_micro_step": "gradients of a window wait as shards"
            if options.reduce_each_micro_step
            else "gradients of a window wait whole",
        },
    )


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """bf16-mixed gathers and computes in bf16; the shards, and so the masters and the reduction, stay fp32."""
    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # reduce_dtype follows the gradient's dtype when it is unset.
    return MixedPrecisionPolicy()


def shard(model: nn.Module, settings: EngineSettings, options: Fsdp2Options) -> None:
    """Apply fully_shard to the units of `model` and to its root."""
    mesh = device_mesh(settings.world, options.replicas)
    offload = offload_policy(options.cpu_offload)
    policy = mixed_precision(settings.precision)
    shard_norms(model, settings, mesh, options.cpu_offload)
    units = find_units(model, settings.blocks)
    check_dtypes(model, units)
    for _, unit in units:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
    # The root holds what is left, and is needed again at once in the backward: it is not resharded in between.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)


def check_dtypes(model: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse trainable parameters of two dtypes in one unit, which fully_shard would flatten together.

    Raises:
        BackendError: names the unit and two parameters.
    """
    names, seen = {p: name for name, p in model.named_parameters()}, set[nn.Parameter]()
    for unit, module in [*units, ("", model)]:
        # What shards already is in a unit of its own.
        own = [p for p in module.parameters() if p.requires_grad and p not in seen and not isinstance(p, DTensor)]
        seen.update(own)
        other = next((p for p in own if p.dtype != own[0].dtype), None)
        if other is not None:
            where = f"the unit {unit}" if unit else "what lies in no block"
            raise BackendError(
                f"this backend cannot shard the model: {where} has trainable parameters of two dtypes, "
                f"{names[own[0]]} ({own[0].dtype}) and {names[other]} ({other.dtype}); call model.float() first, or "
                "list modules of one dtype each under blocks"
            )


def shard_norms(model: nn.Module, settings: EngineSettings, mesh: DeviceMesh | None, cpu_offload: bool) -> None:
    """Under bf16-mixed, gather the weights of torch's own BatchNorm layers in fp32, all layers in one small unit.

    Their running statistics stay fp32, and torch 2.13 refuses those beside bf16 weights; shardkit's layer upcasts.
    """
    norms: list[nn.Module] = [
        m for m in model.modules() if isinstance(m, _BatchNorm) and m.affine and not isinstance(m, BatchNorm)
    ]
    if settings.precision == "bf16-mixed" and norms:
        fully_shard(
            norms,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=offload_policy(cpu_offload),
        )


def reshard(model: nn.Module) -> None:
    """Make the parameters shards again after a forward without a backward.

    The root and every unit that is not resharded after its forward stay gathered then (torch 2.13), and parameters()
    would be other tensors than the optimizer's.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def offload_policy(cpu_offload: bool) -> OffloadPolicy:
    """Host memory between uses, or nothing."""
    if not cpu_offload:
        return OffloadPolicy()
    # Pinning needs an accelerator to pin for.
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def device_mesh(world: World, replicas: int) -> DeviceMesh:
    """One axis of shards, or (replicas, shards) for hybrid sharding."""
    if replicas == 1:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        world.device.type, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard")
    )
