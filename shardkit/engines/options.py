"""What each built-in adapter lets a recipe set under `backend.options`; no torch here, so a typo answers at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True)
class SingleOptions:
    """One process has nothing to set."""


@dataclass(kw_only=True)
class DdpOptions:
    """DistributedDataParallel."""

    find_unused_parameters: bool = False
    # Allow parameters without a gradient; costs a walk over the graph and one small all-reduce a step.
    bucket_cap_mb: float = 25.0
    # MiB of gradients an all-reduce waits for.

    def check(self) -> Iterator[tuple[str, str]]:
        if not self.bucket_cap_mb > 0:
            yield "bucket_cap_mb", f"{self.bucket_cap_mb} is no size of a bucket; expected MiB above 0"


@dataclass(kw_only=True)
class Fsdp2Options:
    """fully_shard."""

    reshard_after_forward: bool = True
    # false = keep the gathered parameters between forward and backward: more memory, one all-gather less.
    cpu_offload: bool = False
    # Parameters, gradients and optimizer state live in host memory between uses.
    reduce_each_micro_step: bool = False
    # true = under accumulation, gradients wait as shards: less memory, a reduce-scatter more a micro-step.
    replicas: int = 1
    # Hybrid sharding: copies of the sharded model; must divide the number of processes.

    def check(self) -> Iterator[tuple[str, str]]:
        if self.replicas < 1:
            yield "replicas", f"{self.replicas} copies hold no model; expected 1 or more"


@dataclass(kw_only=True)
class AccelerateFsdp2Options:
    """fully_shard through Accelerate, which shards over all ranks."""

    reshard_after_forward: bool = True
    # false = keep the gathered parameters between forward and backward: more memory, one all-gather less.
    cpu_offload: bool = False
    # Parameters, gradients and optimizer state live in host memory between uses.
    reduce_each_micro_step: bool = False
    # true = under accumulation, gradients wait as shards: less memory, a reduce-scatter more a micro-step.


@dataclass(kw_only=True)
class DeepSpeedOptions:
    """DeepSpeed ZeRO. Accumulation, clipping, batch sizes and precision come from the recipe, never from here."""

    stage: Literal[1, 2, 3] = 2
    # 1 = optimizer state, 2 = and gradients, 3 = and parameters are sharded.
    offload_optimizer: bool = False
    # fp32 masters and optimizer state live in host memory.
    offload_parameters: bool = False
    # Parameters live in host memory between uses (stage 3).
    overlap_comm: bool = False
    # Reduce gradients while the backward goes on.
    reduce_bucket_size: int | None = None
    # Elements reduced at a time, the size of a buffer; null = chosen from the model (see `shardkit explain`).
    round_robin_gradients: bool = False
    # Spread the copy of gradients to the host over ranks (stages 1 and 2).
    stage3_param_persistence_threshold: int | None = None
    # Parameters of at most so many elements stay whole on every rank (stage 3); null = chosen from the model.
    stage3_prefetch_bucket_size: int | None = None
    # Elements gathered ahead of their use (stage 3); null = chosen from the model.
    stage3_max_live_parameters: int | None = None
    # While so many elements are gathered, nothing is gathered ahead (stage 3); null = chosen from the model.
    stage3_max_reuse_distance: int | None = None
    # A parameter used again within so many elements stays gathered (stage 3); null = chosen from the model, 0 where no
    # block is recomputed: freed after the forward.

    def check(self) -> Iterator[tuple[str, str]]:
        if self.offload_parameters and self.stage != 3:
            yield "offload_parameters", f"stage {self.stage} keeps parameters whole; they can be offloaded in stage 3"
        if self.reduce_bucket_size is not None and self.reduce_bucket_size < 1:
            yield "reduce_bucket_size", f"{self.reduce_bucket_size} elements reduce nothing; expected 1 or more"
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.name.startswith("stage3_"):
                continue
            if self.stage != 3 and value != field.default:
                yield field.name, f"has a meaning in stage 3 alone, and this is stage {self.stage}; leave it out"
            if value is not None and value < 0:
                yield field.name, f"{value} is not a number of elements; expected 0 or more"
        if self.round_robin_gradients and self.stage == 3:
            yield "round_robin_gradients", "has a meaning in stages 1 and 2 alone, and this is stage 3; leave it out"
