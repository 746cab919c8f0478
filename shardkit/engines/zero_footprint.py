"""What ZeRO 1, 2 and 3 need in memory, along the events of a traced micro-step.

Sizes are bytes; parameters, gradients and masters are fp32 under every precision. The rules are those of DeepSpeed
0.19.8: runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py and runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardkit.engines.anatomy import Anatomy
from shardkit.engines.coordinator import Coordinator, Use
from shardkit.engines.footprint import Event, Footprint, Piece, Replay, Trace, Workload, footprint
from shardkit.engines.footprints import STEP, inputs, micro_steps
from shardkit.engines.knobs import chosen, resolved
from shardkit.engines.meaning import Situation
from shardkit.engines.options import DeepSpeedOptions
from shardkit.engines.traffic import flat_groups

ITEM = torch.float32.itemsize
NORM = torch.float64.itemsize
# The norm of a gradient is taken of a copy in fp64, one tensor at a time.
NORMS = "the norm of the gradient"
SUB_GROUP = 10**9
# Elements of a rank's part of a group from which on stage 3 makes the step in several (DeepSpeed's sub_group_size).


def zero_footprint(situation: Situation, workload: Workload, options: DeepSpeedOptions) -> Footprint:
    """What one rank needs however ZeRO was reached.

    Args:
        situation: with the model's layers.
        workload: of one rank.
        options: as given; what is open is chosen from the model, and in `Footprint.settings`.
    """
    settled = resolved(options, situation.anatomy)
    found = (_sharded if settled.stage == 3 else _whole)(situation, workload, settled)
    return replace(found, settings=chosen(options, situation.anatomy))


def _whole(situation: Situation, workload: Workload, options: DeepSpeedOptions) -> Footprint:
    """Stages 1 and 2: whole parameters in one flat buffer a group, of which a rank updates a part."""
    parts = _Parts(situation, workload.rank, options)
    weights = situation.anatomy.weights
    frozen = sum(weight.numel for weight in weights if not weight.trainable) * ITEM
    flat = sum(parts.flat) * ITEM
    own = [size // situation.world_size for size in parts.flat]
    masters = sum(own) * ITEM
    state, temporary = _optimizer(situation.anatomy.groups, own, workload)
    offloads = options.offload_optimizer
    largest = max(parts.numel.values()) * ITEM
    replay = Replay(
        {
            "parameters": flat + frozen,
            "masters": 0 if offloads else masters,
            "optimizer": 0 if offloads else state,
            "buffers": workload.buffers,
            "communication": largest if offloads else 0,
        }
    )
    trace = workload.trace(situation.stored)
    buckets = _Buckets(replay, parts, options)
    for last in micro_steps(situation):
        for event in trace.events:
            replay.reach(event)
            if event.what == "gradient":
                buckets.arrive(event.name, last)
        buckets.end(last)
    replay.moment(NORMS, 0 if offloads else parts.largest * NORM)
    gradients = 0
    for index, size in enumerate(own if not offloads else ()):
        replay.moment(STEP, 0)
        # A part that lies within one parameter is stepped on its gradient as it lies there.
        within = parts.tensors[index] == 1 and not parts.padding[index]
        replay.hold("gradients", "flat", 0 if within else size * ITEM)
        if index == len(own) - 1 and not within:
            replay.drop("gradients", "sum")
        if index == 0:
            gradients = replay.held("gradients", "flat") + replay.held("gradients", "sum")
            gradients += sum(parts.padding[1:]) * ITEM
        replay.moment(STEP, temporary[index])
    host = 3 * masters + state + largest if offloads else 0
    if offloads and options.stage == 2 and situation.accumulation > 1:
        # What has been added up of each parameter, whole.
        host += parts.kept * ITEM
    return footprint(
        replay,
        inputs(situation, trace),
        parameters=flat + frozen,
        masters=0 if offloads else masters,
        gradients=gradients,
        optimizer=0 if offloads else state,
        buffers=workload.buffers,
        loading=workload.buffers + frozen + _flattening(situation.anatomy, parts, own, workload.moved),
        host=host,
    )


def _flattening(anatomy: Anatomy, parts: _Parts, own: Sequence[int], moved: bool) -> int:
    """The most while groups are copied into flat buffers one after the other, and masters and gradients are made.

    With `moved`, where there is no room for both, DeepSpeed takes a group's parameters to the host to flatten them.
    """
    sizes = [sum(parts.numel[name] for name in group) for group in anatomy.groups]
    during = [
        sum(parts.flat[: index + 1]) + sum(own[:index]) + sum(sizes[index + moved :])
        for index in range(len(anatomy.groups))
    ]
    return max(sum(sizes), *during, sum(parts.flat) + 2 * sum(own)) * ITEM


@dataclass(frozen=True, kw_only=True)
class _Own:
    """What of one parameter lies in a rank's part of its flat group."""

    ranks: frozenset[int]
    # All that have some of it.
    numel: int
    # Of this rank's part.


class _Parts:
    """The flat groups of stages 1 and 2, and what one rank has of them."""

    def __init__(self, situation: Situation, rank: int, options: DeepSpeedOptions) -> None:
        world = situation.world_size
        self.numel = {weight.name: weight.numel for weight in situation.anatomy.trainable}
        self.flat = list(flat_groups(situation))
        self.rank = rank
        self.order = [name for group in situation.anatomy.groups for name in group]
        self.of: dict[str, _Own] = {}
        self.padding: list[int] = []
        # Elements of this rank's part of each group that are no parameter's,
        self.tensors: list[int] = []
        # and of how many tensors the rest is.
        for group, size in zip(situation.anatomy.groups, self.flat, strict=True):
            part, offset = size // world, 0
            for name in _dealt(group, world) if options.round_robin_gradients else group:
                end = offset + self.numel[name]
                ranks = frozenset(range(offset // part, -(-end // part))) if end > offset else frozenset[int]()
                length = max(0, min(end, (rank + 1) * part) - max(offset, rank * part))
                self.of[name] = _Own(ranks=ranks, numel=length)
                offset = end
            lengths = [self.of[name].numel for name in group]
            self.padding.append(part - sum(lengths))
            self.tensors.append(sum(length > 0 for length in lengths))
        self.kept = sum(self.numel[name] for name, own in self.of.items() if rank in own.ranks)
        # Elements of the parameters of which this rank has some: their gradients are kept whole.
        self.largest = max(own.numel for own in self.of.values())


def _dealt(group: Sequence[str], ranks: int) -> list[str]:
    """A group in the order of round_robin_gradients."""
    return [name for rank in range(ranks) for name in group[rank::ranks]]


class _Buckets:
    """Gradients on their way into one buffer, which is reduced when it is full.

    Stage 2 reduces as they arrive, in each micro-step; stage 1 adds them up whole and reduces after the window's last
    backward. A reduction copies the bucket unless all of it goes to one rank; then what this rank keeps is copied out.
    """

    def __init__(self, replay: Replay, parts: _Parts, options: DeepSpeedOptions) -> None:
        self._replay, self._parts = replay, parts
        self._stage, self._overlaps = options.stage, options.overlap_comm
        self._offloads = options.offload_optimizer
        self._room = options.reduce_bucket_size or 1
        self._pending: list[str] = []
        self._elements = 0

    def arrive(self, name: str, last: bool) -> None:
        self._replay.hold("gradients", name, self._parts.numel[name] * ITEM)
        self._replay.hold("communication", "bucket", self._room * ITEM * (2 if self._overlaps else 1))
        if self._stage == 2 or (self._overlaps and last):
            self._take(name)

    def end(self, last: bool) -> None:
        if self._stage == 1 and not last:
            return
        if self._stage == 1 and not self._overlaps:
            for name in self._parts.order:
                self._take(name)
        self._reduce()
        if self._replay.held("gradients", "kept"):
            # They are added to those of micro-steps before.
            self._replay.hold("gradients", "sum", self._parts.kept * ITEM)
            self._replay.drop("gradients", "kept")
        self._replay.drop("communication", "bucket")

    def _take(self, name: str) -> None:
        if self._elements + self._parts.numel[name] > self._room:
            self._reduce()
        if self._parts.numel[name] <= self._room:
            # It lies in the bucket now.
            self._replay.drop("gradients", name)
        self._pending.append(name)
        self._elements += self._parts.numel[name]

    def _reduce(self) -> None:
        if not self._pending:
            return
        if len(frozenset[int]().union(*(self._parts.of[name].ranks for name in self._pending))) > 1:
            self._replay.hold("communication", "reduced", self._elements * ITEM)
        own = any(self._parts.rank in self._parts.of[name].ranks for name in self._pending)
        if own and not self._offloads:
            self._replay.hold("gradients", "kept", self._parts.kept * ITEM)
        # gloo may let go of what it has reduced only now.
        self._replay.drop("communication", "reduced")
        for name in self._pending:
            self._replay.drop("gradients", name)
        self._pending, self._elements = [], 0


def _sharded(situation: Situation, workload: Workload, options: DeepSpeedOptions) -> Footprint:
    """Stage 3: a part of each parameter, padded to a multiple of the ranks; whole ones gathered around their use.

    Gradients have a buffer of their own, and are copied for the step. Not counted: the inputs of frozen linear layers,
    which DeepSpeed's own linear (runtime/zero/linear.py) keeps for the backward and torch's does not.
    """
    world, anatomy = situation.world_size, situation.anatomy
    part = {weight.name: -(-weight.numel // world) for weight in anatomy.weights}
    numel = {weight.name: weight.numel for weight in anatomy.trainable}
    parameters = sum(part.values()) * ITEM
    trained = sum(part[name] for name in numel) * ITEM
    groups = [sub for group in anatomy.groups for sub in _sub_groups(group, part)]
    own = [sum(part[name] for name in group) for group in groups]
    state, temporary = _optimizer(groups, own, workload)
    offloads, away = options.offload_optimizer, options.offload_parameters
    bucket = (options.reduce_bucket_size or 1) * ITEM
    replay = Replay(
        {
            "parameters": 0 if away else parameters,
            "masters": 0 if offloads else trained,
            "gradients": 0 if offloads else trained,
            "optimizer": 0 if offloads else state,
            "buffers": workload.buffers,
            "communication": bucket,
        }
    )
    trace = workload.trace(situation.stored)
    gathers = _Gathers(replay, situation, options, list(_uses(trace, anatomy)))
    scatters = _Scatters(replay, numel, world, options)
    for _ in micro_steps(situation):
        gathers.begin()
        for event in trace.events:
            replay.reach(event)
            if event.what == "gradient":
                scatters.arrive(event.name)
            else:
                gathers.come(event)
        scatters.reduce()
        gathers.end()
    gathers.release()
    if not offloads:
        replay.moment(NORMS, max(part[name] for name in numel) * NORM)
    gradients = 0
    for index, group in enumerate(groups if not offloads else ()):
        replay.moment(STEP, 0)
        # A group of one parameter is stepped on its gradient as it lies there.
        replay.hold("gradients", "flat", own[index] * ITEM if len(group) > 1 else 0)
        if index == 0:
            gradients = trained + replay.held("gradients", "flat")
        replay.moment(STEP, temporary[index])
    sizes = [weight.numel * ITEM for weight in anatomy.weights]
    held = 0 if away else parameters
    return footprint(
        replay,
        inputs(situation, trace),
        parameters=0 if away else parameters,
        masters=0 if offloads else trained,
        gradients=gradients,
        optimizer=0 if offloads else state,
        buffers=workload.buffers,
        loading=workload.buffers
        + max(
            # Each is there whole until it is parts; where the model is built on the device, all are.
            held + max(sizes) if workload.moved else sum(sizes),
            # Each is gathered once to be hooked.
            held + (0 if offloads else 2 * trained) + bucket + max(part[name] for name in numel) * world * ITEM,
        ),
        host=(parameters if away else 0) + (3 * trained + state if offloads else 0),
    )


def _sub_groups(group: Sequence[str], part: dict[str, int]) -> Iterator[list[str]]:
    """What stage 3 makes one step of."""
    names: list[str] = []
    for name in group:
        names.append(name)
        if sum(part[each] for each in names) >= SUB_GROUP:
            yield names
            names = []
    if names:
        yield names


def _uses(trace: Trace, anatomy: Anatomy) -> Iterator[Use]:
    paths = {layer.path for layer in anatomy.layers}
    for event in trace.events:
        if event.what != "gradient" and event.name in paths:
            yield Use(event.what, event.name)


@dataclass
class _Flight:
    """Several parameters that are gathered into one buffer."""

    key: str
    names: tuple[str, ...]
    missing: set[str] = field(init=False)
    # Those that have not been waited for.

    def __post_init__(self) -> None:
        self.missing = set(self.names)


class _Gathers:
    """Which parameters are there whole.

    One is gathered into a buffer of its own. Several are gathered into one and copied out, and the buffer is there
    until all of them have been waited for. On one rank the parts are the parameters.
    """

    def __init__(self, replay: Replay, situation: Situation, options: DeepSpeedOptions, uses: Sequence[Use]) -> None:
        world = situation.world_size
        self._replay, self._several = replay, world > 1
        self._own = {layer.path: layer.weights for layer in situation.anatomy.layers}
        self._numel = {weight.name: weight.numel for weight in situation.anatomy.weights}
        self._padded = {name: -(-numel // world) * world for name, numel in self._numel.items()}
        self._coordinator = Coordinator(uses, situation.anatomy, options, situation.accumulation)
        self._flights: list[_Flight] = []
        self._there: set[str] = set()

    def begin(self) -> None:
        self._coordinator.begin()
        for name in self._coordinator.stay:
            self._hold(name, self._padded[name])

    def come(self, event: Event) -> None:
        if event.name not in self._own or not self._several:
            return
        own, ahead = self._coordinator.come(Use(event.what, event.name))  # pyright: ignore[reportArgumentType]
        if event.what in ("forward", "backward"):
            self._gather(own)
            self._wait(self._own[event.name])
            self._gather(ahead)
        for name in self._there - self._coordinator.whole:
            self._drop(name)

    def end(self) -> None:
        """What was not freed in the backward, as its input needs no gradient, is freed at its end."""
        for name in self._there - self._coordinator.stay:
            self._drop(name)
        for flight in self._flights:
            self._replay.drop("communication", flight.key)
        self._flights = []

    def release(self) -> None:
        """Before the step."""
        for name in set(self._there):
            self._drop(name)

    def _gather(self, names: Sequence[str]) -> None:
        if len(names) == 1:
            self._hold(names[0], self._padded[names[0]])
        elif names:
            flight = _Flight(" ".join(names), tuple(names))
            self._replay.hold("communication", flight.key, sum(self._padded[name] for name in names) * ITEM)
            self._flights.append(flight)

    def _wait(self, names: Sequence[str]) -> None:
        for flight in [flight for flight in self._flights if not flight.missing.isdisjoint(names)]:
            if len(flight.missing) == len(flight.names):
                for name in flight.names:
                    self._hold(name, self._numel[name])
            flight.missing.difference_update(names)
            if not flight.missing:
                self._replay.drop("communication", flight.key)
                self._flights.remove(flight)

    def _hold(self, name: str, elements: int) -> None:
        if self._several:
            self._replay.hold("parameters", name, elements * ITEM)
            self._there.add(name)

    def _drop(self, name: str) -> None:
        self._replay.drop("parameters", name)
        self._there.discard(name)


class _Scatters:
    """Gradients on their way to the ranks that keep them: a full bucket is copied by parts, reduced and scattered."""

    def __init__(self, replay: Replay, numel: dict[str, int], world: int, options: DeepSpeedOptions) -> None:
        self._replay, self._numel, self._world = replay, numel, world
        self._room = options.reduce_bucket_size or 1
        self._pending: list[str] = []
        self._elements = 0

    def arrive(self, name: str) -> None:
        size = self._numel[name]
        self._replay.hold("gradients", name, size * ITEM)
        if self._pending and self._elements + size > self._room:
            self.reduce()
        if self._elements + size <= self._room:
            # It lies in the bucket now.
            self._replay.drop("gradients", name)
        self._pending.append(name)
        self._elements += size

    def reduce(self) -> None:
        """Also at the end of a backward."""
        sizes = [self._numel[name] for name in self._pending]
        if len(sizes) > 1 or any(size % self._world for size in sizes):
            padded = sum(-(-size // self._world) * self._world for size in sizes)
            self._replay.hold("communication", "scattered", padded * ITEM)
            self._replay.drop("communication", "scattered")
        for name in self._pending:
            self._replay.drop("gradients", name)
        self._pending, self._elements = [], 0


def _optimizer(groups: Sequence[Sequence[str]], own: Sequence[int], workload: Workload) -> tuple[int, list[int]]:
    """Bytes of its state for a flat tensor a group, and what it needs for a moment in the step of each."""

    def flat(sizes: Sequence[int]) -> list[Piece]:
        named = zip(groups, sizes, strict=True)
        return [Piece(name=group[0], shape=(size,), dtype=torch.float32) for group, size in named]

    # The others are there with nothing in them, as each of the recipe's groups has to have parameters.
    alone = ([size if index == chosen else 0 for index, size in enumerate(own)] for chosen in range(len(own)))
    return workload.optimizer(flat(own)).state, [workload.optimizer(flat(sizes)).temporary for sizes in alone]
