"""What a rank needs in memory under a backend: stated by its adapter from sizes, and from one traced micro-step.

A trace is made once, of the bare model (`shardkit.planning.trace`). An adapter goes along its events and adds what it
itself holds at each: gathered units, buckets, gradients. So no backend is started, and any number of ranks costs the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

What = Literal["forward", "forward_end", "backward", "backward_end", "gradient"]
Part = Literal["parameters", "masters", "optimizer", "gradients", "buffers", "communication", "activations"]
STATES: tuple[Part, ...] = ("parameters", "masters", "optimizer", "gradients", "buffers")


@dataclass(frozen=True, slots=True)
class Event:
    """Something an adapter may react to, in the order in which it happens."""

    what: What
    # forward, forward_end: of a module, again when its block is recomputed. backward: the first gradient of a module's
    # outputs is there. backward_end: those of its inputs are. gradient: a parameter has got all of its own.
    name: str
    # Path of the module ("" is the model), or full name of the parameter.
    high: int
    # Most bytes of activations at one time since the event before; what operators make and free again is among them,
    # and a gradient on its way to its parameter.
    level: int
    # Bytes of activations now.


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward and backward of one micro-batch, without any backend.

    Activations are what operators make: neither parameters, nor their gradients once they are complete, nor buffers,
    nor the micro-batch itself.
    """

    events: tuple[Event, ...]
    inputs: int
    # Bytes of the micro-batch.
    flops: int
    # Of its forward and backward, recomputation included (matrix products, convolutions, attention).

    @property
    def peak(self) -> int:
        """Most bytes of activations at one time."""
        return max((event.high for event in self.events), default=0)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor that an optimizer steps on."""

    name: str
    # Full name of the parameter; of a flat group, of its first. It decides which of the recipe's groups it is in.
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class OptimizerNeeds:
    """Bytes an optimizer needs for the pieces it steps on."""

    state: int
    # What it keeps, with its counters where they lie on the device.
    temporary: int
    # The most it makes and frees again within a step.


class Workload(Protocol):
    """What an adapter is told besides its `Situation`."""

    buffers: int
    # Bytes of the model's buffers, those that are not saved too.
    rank: int
    moved: bool
    # Whether the model is built in another memory than the device's.
    units: tuple[str, ...]
    # Paths of the sharding units' modules, in the order of `Anatomy.units`.

    def trace(self, stored: torch.dtype) -> Trace:
        """A micro-step with parameters of this dtype in the forward, under the recipe's precision."""
        ...

    def optimizer(self, pieces: Sequence[Piece]) -> OptimizerNeeds:
        """What the recipe's optimizer needs for these."""
        ...


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank: on its device, but for `host`."""

    parameters: int
    # What the model holds between steps.
    gradients: int
    # Complete, at the optimizer's step.
    masters: int
    # Copies of the weights that the optimizer updates, where it does not update the model's own.
    optimizer: int
    buffers: int
    peak: int
    # The most at one time, of a step that has one before it.
    at_peak: dict[Part, int] = field(default_factory=dict)
    # What it is made of.
    when: str = ""
    # The moment of the peak, as "backward of blocks.3".
    loading: int = 0
    # The most while the model is put onto the device and wrapped.
    host: int = 0
    # Of tensors in host memory while it trains, where that is not the device.
    host_loading: int = 0
    # Of tensors in host memory while it starts, where that is not the device.
    settings: dict[str, int] = field(default_factory=dict)
    # Sizes of buffers that were chosen from the model, by backend option.


class Replay:
    """Goes along a trace with what a backend holds, and keeps the most at one time.

    replay = Replay({"parameters": 400, "optimizer": 800})
    for event in trace.events:
        replay.reach(event)
        if event.what == "gradient":
            replay.hold("gradients", event.name, sizes[event.name])
    replay.peak, replay.at_peak, replay.when
    """

    def __init__(self, states: dict[Part, int]) -> None:
        self._states: dict[Part, int] = {part: size for part, size in states.items() if size}
        self._held: dict[tuple[Part, str], int] = {}
        self._sums: dict[Part, int] = {}
        self._total = sum(self._states.values())
        self._level = 0
        self._now: Event | str = ""
        self._then: Event | str = ""
        self._at_peak: dict[Part, int] = {}
        self.peak = 0

    def reach(self, event: Event) -> None:
        """Come to an event: what is held now was held all the way to it."""
        self._mark(event.high)
        self._level, self._now = event.level, event
        self._mark(event.level)

    def hold(self, part: Part, key: str, size: int) -> None:
        """From here on hold `size` bytes; under the same part and key, in place of what was held."""
        before = self._held.pop((part, key), 0)
        if size:
            self._held[part, key] = size
        self._sums[part] = self._sums.get(part, 0) + size - before
        self._total += size - before
        self._mark(self._level)

    def drop(self, part: Part, key: str) -> None:
        """No longer hold it; what is not held is no error."""
        self.hold(part, key, 0)

    def held(self, part: Part, key: str) -> int:
        """Bytes held under a part and key."""
        return self._held.get((part, key), 0)

    def moment(self, when: str, temporary: int, level: int = 0) -> None:
        """Need `temporary` bytes for a moment, with `level` bytes of activations beside what is held."""
        self._now, self._level = when, level
        self._mark(level + temporary)

    @property
    def at_peak(self) -> dict[Part, int]:
        """What the peak is made of."""
        parts = dict(self._states)
        for part, size in self._at_peak.items():
            parts[part] = parts.get(part, 0) + size
        return {part: size for part, size in parts.items() if size}

    @property
    def when(self) -> str:
        """The moment of the peak."""
        then = self._then
        return then if isinstance(then, str) else f"{then.what.replace('_', ' ')} of {then.name or 'the model'}"

    def _mark(self, activations: int) -> None:
        total = self._total + activations
        if total > self.peak:
            self.peak, self._then = total, self._now
            self._at_peak = {**self._sums, "activations": self._sums.get("activations", 0) + activations}


def footprint(replay: Replay, inputs: int, **known: Any) -> Footprint:
    """What a replay has come to, and the fields of a `Footprint` that are known without it.

    The micro-batches of the window (`inputs` bytes) are counted as activations.
    """
    at_peak = dict(replay.at_peak)
    at_peak["activations"] = at_peak.get("activations", 0) + inputs
    facts = {**dict.fromkeys(STATES, 0), **known}
    return Footprint(**facts, peak=replay.peak + inputs, at_peak=at_peak, when=replay.when)
