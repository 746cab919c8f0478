"""What a backend makes of a recipe's settings, stated as data by its adapter before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardkit.communication import Traffic

if TYPE_CHECKING:
    from shardkit.engines.anatomy import Anatomy
    from shardkit.engines.api import Engine, Precision, Traits

SHORT = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What an adapter is told in order to say what it would do."""

    anatomy: Anatomy
    world_size: int
    accumulation: int
    # Micro-steps in a full window.
    precision: Precision
    max_grad_norm: float | None
    micro_batch_size: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the model as it is built; the widest where there are several."""
        dtypes = {weight.dtype for weight in self.anatomy.weights}
        return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)

    @property
    def stored(self) -> torch.dtype:
        """Of the parameters between steps, where the backend keeps no other."""
        return torch.bfloat16 if self.precision == "bf16-true" else self.dtype

    @property
    def computed(self) -> torch.dtype:
        """Of matrix products and convolutions."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision[:4], self.dtype)


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What settings come to under one backend; dtypes by their short names, as "fp32"."""

    storage: str
    # Of the parameters that the model holds between steps.
    compute: str
    gather: str = NONE
    # Of the parameters on their way to where they are used; "none" where they are there.
    reduce: str
    # Of the gradients that cross ranks.
    masters: str
    # Of the weights that the optimizer updates, and where they are.
    norm_statistics: str
    # Of the running statistics of norms.
    averages: str
    # What divides gradients by the number of ranks, which shardkit makes up for in the loss.
    clips: str
    # Where, and by which norm.
    nonfinite: str
    # How a gradient that is not finite is found.
    traffic: Traffic | None = None
    # Kind -> what a rank takes part in per optimizer step, once the libraries have made their plans (from the third
    # step on); None = not known.
    least: Traffic | None = None
    # What the same sharding would need at least.
    notes: tuple[str, ...] = ()
    # Sentences on what is communicated beyond that, or otherwise than one expects.
    translated: Mapping[str, str] = field(default_factory=dict)
    # Recipe key -> the library's own setting it becomes.


def short(dtype: torch.dtype) -> str:
    """fp32 for torch.float32."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def meaning_of(adapter: type[Engine], options: Any, situation: Situation) -> Meaning:
    """What an adapter says; for one that says nothing, what follows from its traits."""
    explain = getattr(adapter, "explain", None)
    return explain(options, situation) if explain else from_traits(adapter.describe(options), situation)


def from_traits(traits: Traits, situation: Situation) -> Meaning:
    """What holds for any engine that keeps the contract of `shardkit.Engine`, and its traits."""
    reduced = "unknown" if situation.world_size > 1 and traits.reduces != "nothing" else NONE
    return Meaning(
        storage=short(situation.stored),
        compute=short(situation.computed),
        gather="unknown" if "parameters" in traits.shards else NONE,
        reduce=reduced,
        masters="unknown" if traits.shards else f"{short(situation.stored)}, the parameters themselves",
        norm_statistics=short(situation.stored),
        averages="the engine" if situation.world_size > 1 else NONE,
        clips=clipping(situation, "the engine"),
        nonfinite="the global norm of the gradient",
    )


def plain(situation: Situation, **more: Any) -> Meaning:
    """What engines of torch.optim have in common: parameters that are their own masters, and the shared step."""
    stored = short(situation.stored)
    facts: dict[str, Any] = {
        "storage": stored,
        "compute": short(situation.computed),
        "reduce": stored if situation.world_size > 1 else NONE,
        "masters": f"{stored}, the parameters themselves",
        "norm_statistics": stored,
        "averages": NONE,
        "clips": clipping(situation, "shardkit, before the optimizer"),
        "nonfinite": "the global norm of the gradient",
    }
    return Meaning(**{**facts, **more})


def clipping(situation: Situation, who: str) -> str:
    """Where gradients are clipped; by the global 2-norm, in any engine that keeps the contract."""
    if situation.max_grad_norm is None:
        return "nowhere"
    return f"{who}, by the global 2-norm"
