"""The engine: what the loop asks of a backend, and the facts a backend states about itself.

The loop works in windows (one logical batch) of micro-steps (one forward and backward). The loss it hands to
`backward` is in its final scale: an engine that divides it by anything is wrong.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from shardkit.engines.footprint import Footprint, Part, Workload
from shardkit.engines.held import held
from shardkit.engines.meaning import Meaning, Situation, from_traits
from shardkit.normalization.logical_batch import LogicalBatch
from shardkit.world import World

NamedParameters = list[tuple[str, nn.Parameter]]

# Given the (full name, parameter) pairs that can be trained, returns the optimizer. Called once, by the engine, when
# the parameters are the ones that will be trained.
MakeOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]

Kind = Literal["parameter", "buffer", "optimizer"]
# A number the optimizer keeps for a parameter; a tensor here has no dimension.
Scalar = torch.Tensor | float | int | bool | None
Precision = Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16-true"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about an adapter, each held by a conformance test."""

    shards: frozenset[str] = frozenset()
    # Of "parameters", "gradients", "optimizer": what each rank holds only a part of.
    reduces: Literal["nothing", "once a window", "each micro-step"] = "once a window"
    # When gradients cross ranks.
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    # Device types it runs on.
    precisions: frozenset[str] = frozenset({"fp32", "bf16-mixed", "bf16-true"})
    # Values of train.precision it honours.
    max_world_size: int | None = None
    # The largest world it runs in; None = any.
    constant_memory: bool = True
    # Blocks can run one micro-batch at a time, several times over (normalization.exact.memory: constant).
    world_multiple: int = 1
    # The number of processes must be a multiple of it.
    needs_process_group: bool = True
    # False: also runs in a process that joined no group.
    unused_parameters: Literal["kept", "refused", "refused when changed"] = "kept"
    # A parameter that a window gives no gradient: left as it is, or named in an error before the step.
    counts_steps_by_group: bool = False
    # The optimizer sees one tensor a parameter group, so what it counts is one number for all of the group.
    offloads: bool = False
    # Some of it lies in host memory between uses.
    refused_optimizers: frozenset[str] = frozenset()
    # Optimizer class names it would train wrongly.
    refusals: dict[str, str] = field(default_factory=dict)
    # Device type -> the sentence that says why it does not run there and what to use.


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every adapter is told, besides its own options."""

    world: World
    max_grad_norm: float | None = None
    # Clip by the global norm; None = no clipping.
    precision: Precision = "fp32"
    blocks: tuple[str, ...] = ()
    # Globs on module or class names that form one sharding unit each; empty = found in the model.
    micro_batch_size: int = 1
    # Only told to backends that insist on knowing it; never used for scaling.


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did, the same on every rank."""

    grad_norm: float
    # Global 2-norm of the gradient before clipping; NaN or infinite when the gradient is.
    skipped: bool
    # True when the gradient was not finite: weights, optimizer state and scheduler are as before.


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A flat row-major piece of one tensor of the training state, as this rank holds it.

    `tensor` is a live 1-D view of `tensor.numel()` elements that starts at element `start` of the whole tensor of
    `shape`. Equal copies of an interval lie on several ranks: one a rank for replicas, one a replica under hybrid
    sharding.
    """

    kind: Kind
    name: str
    # The model's own full name of the parameter or buffer.
    state: str | None
    # For kind "optimizer": the tensor's key, as in "exp_avg".
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    copy: int = 0
    # Which of the equal copies of this interval this rank holds,
    copies: int = 1
    # and how many there are.
    writeback: Callable[[], None] | None = None
    # Where the memory is not contiguous, `tensor` is a copy; this puts what was written into it back.


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """What the optimizer keeps for one parameter; of its tensors, only what they look like."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    # Key -> shape of the whole tensor, and dtype.
    scalars: dict[str, Scalar]


class Engine(Protocol):
    """A model and its optimizer under one backend.

    An adapter inherits nothing but this interface. It does all wrapping in its constructor: the model is moved to
    `settings.world.device`, wrapped, and then the optimizer is built on what will be trained. `open_engine` has given
    every rank rank 0's parameters and buffers before.
    Gradients are averaged over the ranks, and the caller knows: it scales the loss by the number of ranks.
    """

    @abstractmethod
    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, settings: EngineSettings, options: Any
    ) -> None: ...

    Options: ClassVar[type]
    model: nn.Module
    # Callable like the model that came in.
    optimizer: torch.optim.Optimizer
    # Its param_groups' lr is what the next step uses: schedulers are built on it.
    groups: tuple[tuple[str, ...], ...]
    # Full names of the parameters in each of its param_groups; set by `open_engine`.
    traits: Traits
    world: World
    name: str
    # Of the backend, and
    aliases: Mapping[str, str]
    # other names of tied parameters -> the name they are kept under: both set by `open_engine`.
    norms: LogicalBatch
    # Set by `open_engine`, which applies the normalization policy before the adapter wraps the model.

    @classmethod
    @abstractmethod
    def describe(cls, options: Any) -> Traits:
        """The facts about this adapter under `options`, without building anything."""

    @classmethod
    def explain(cls, options: Any, situation: Situation) -> Meaning:
        """What a recipe's settings come to here, without building anything; by default what the traits tell."""
        return from_traits(cls.describe(options), situation)

    @abstractmethod
    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """Context around ONE forward and backward; gradients cross ranks only when `last`, where the backend can.

        Compute precision (autocast) is also entered here.
        """
        ...

    @abstractmethod
    def inference(self) -> AbstractContextManager[None]:
        """Context around forwards without a backward: no gradients, the same compute precision."""
        ...

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a scalar loss in its final scale; gradients add up over the window."""

    @abstractmethod
    def step(self) -> StepReport:
        """Clip by the global norm, update, zero the gradients. A gradient that is not finite skips the update."""

    @abstractmethod
    def state(self) -> Iterable[Interval]:
        """This rank's part of the training state; reading it changes nothing.

        Parameters are the fp32 masters where there are any.

        Raises:
            EngineError: gradients of an unfinished window are pending, or what the model computes with is not the
                cast of its master.
        """

    @abstractmethod
    def scalars(self) -> dict[str, dict[str, Scalar]]:
        """Full name -> key -> number: what the optimizer keeps besides tensors ("step", NAdam's "mu_product", ...).

        For the parameters that this rank holds something of.
        """
        ...

    @abstractmethod
    def load_state(self, optimizer: Mapping[str, OptimizerState] | None) -> AbstractContextManager[Iterable[Interval]]:
        """Yields this rank's live intervals to be written into; on leaving, what is derived from them is refreshed.

        Collective: every rank enters and leaves, also when it writes nothing.

        Args:
            optimizer: by full name, what the optimizer shall keep for a parameter. Its tensors are made (zeros) and
                its numbers set, without a step, and whatever it kept before is dropped; a parameter that is absent
                keeps nothing. None = the optimizer's state is left alone.

        Raises:
            EngineError: before anything is changed, when the backend cannot hold it (ZeRO: parameters of one flat
                group with different numbers; it names two).
        """
        ...

    @classmethod
    def footprint(cls, options: Any, situation: Situation, workload: Workload) -> Footprint | None:
        """What one rank needs in memory, without building anything; None = this adapter does not say."""
        return None

    def held(self) -> Iterable[tuple[Part, torch.Tensor]]:
        """The live tensors of this rank's state; asked within the optimizer's step, when gradients are complete."""
        return held(self.model, self.optimizer)

    @abstractmethod
    def close(self) -> None:
        """Let go of the model and of what the backend keeps; the process group stays."""


__all__ = [
    "Engine",
    "EngineSettings",
    "Interval",
    "Kind",
    "MakeOptimizer",
    "NamedParameters",
    "OptimizerState",
    "Precision",
    "Scalar",
    "StepReport",
    "Traits",
]
