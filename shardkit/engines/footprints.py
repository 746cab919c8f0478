"""What replicas and fully_shard need in memory, along the events of a traced micro-step.

Sizes are bytes. A window is gone through as its first micro-step and, where it has more than one, its last: what a
backend holds in those between is what it holds in the first once gradients are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shardkit.engines.anatomy import Weight
from shardkit.engines.footprint import Footprint, Piece, Replay, Trace, Workload, footprint
from shardkit.engines.meaning import Situation

STEP = "the optimizer's step"
SENT = 250 * 2**20
# Bytes of each copy in which DistributedDataParallel sends parameters and buffers as it is made (torch 2.13).


def replicas_footprint(situation: Situation, workload: Workload, *, buckets: bool) -> Footprint:
    """Parameters, gradients and optimizer state whole on every rank.

    With `buckets`, gradients are views of the buckets that DistributedDataParallel keeps (gradient_as_bucket_view);
    those of micro-steps before the last, which it does not see, are memory of their own until they get there.
    """
    stored = situation.stored
    sizes = {weight.name: weight.numel * stored.itemsize for weight in situation.anatomy.trainable}
    parameters = sum(weight.numel for weight in situation.anatomy.weights) * stored.itemsize
    needs = workload.optimizer(pieces(situation.anatomy.trainable, stored))
    trace = workload.trace(stored)
    gradients = sum(sizes.values())
    replay = Replay(
        {
            "parameters": parameters,
            "optimizer": needs.state,
            "buffers": workload.buffers,
            "gradients": gradients if buckets else 0,
        }
    )
    for last in micro_steps(situation):
        for event in trace.events:
            replay.reach(event)
            if event.what != "gradient":
                continue
            if not buckets or not last:
                replay.hold("gradients", event.name, sizes[event.name])
            else:
                replay.drop("gradients", event.name)
    replay.moment(STEP, needs.temporary)
    whole = parameters + workload.buffers
    return footprint(
        replay,
        inputs(situation, trace),
        parameters=parameters,
        gradients=gradients,
        optimizer=needs.state,
        buffers=workload.buffers,
        loading=whole + (max(gradients, min(whole, SENT)) if buckets else 0),
    )


def fully_shard_footprint(
    situation: Situation,
    workload: Workload,
    *,
    reshard_after_forward: bool,
    shards: int,
    cpu_offload: bool = False,
    reduce_each_micro_step: bool = False,
) -> Footprint:
    """Rows of each parameter over `shards` ranks, padded to the same number; units gathered around their use.

    What torch 2.13 holds beside them: a unit's flat gathered buffer until the next has been copied out or the forward
    ends (in the backward only until its own has been), the coming unit's in the backward (prefetched), the whole
    gradients of a unit until they are reduced, and the flat input of the last reduction until the next. Gradients of
    micro-steps before the last stay whole, unless they are reduced in each. The root stays gathered between forward and
    backward.
    """
    units = _Units(situation, workload, shards)
    stored = situation.stored
    mixed = situation.precision == "bf16-mixed"
    computed = situation.computed if mixed else stored
    reduced = torch.float32 if mixed else stored
    trace = workload.trace(computed)
    weights, trained = situation.anatomy.weights, situation.anatomy.trainable
    parameters = sum(weight.padded(shards) // shards for weight in weights) * stored.itemsize
    gradients = sum(weight.padded(shards) // shards for weight in trained) * stored.itemsize
    rank = workload.rank % shards
    local = [
        Piece(name=weight.name, shape=weight.rows_of(rank, shards), dtype=stored)
        for weight in situation.anatomy.trainable
    ]
    needs = workload.optimizer(local)
    host = parameters + gradients + needs.state if cpu_offload else 0
    replay = Replay(
        {
            "parameters": 0 if cpu_offload else parameters,
            "optimizer": 0 if cpu_offload else needs.state,
            "buffers": workload.buffers,
        }
    )
    gathers = _Gathers(replay, units, computed.itemsize, stored.itemsize, reshard_after_forward)
    reduces = _Reductions(replay, units, computed.itemsize, reduced.itemsize, stored.itemsize, cpu_offload)
    for last in micro_steps(situation):
        gathers.begin()
        reduces.begin(last or reduce_each_micro_step)
        for event in trace.events:
            replay.reach(event)
            unit = units.of_module.get(event.name) if event.what != "gradient" else None
            if event.what == "gradient":
                reduces.arrived(event.name)
            elif unit is None:
                continue
            elif event.what == "forward":
                gathers.forward(unit)
            elif event.what == "forward_end":
                gathers.forward_end(unit)
            elif event.what == "backward":
                gathers.backward(unit)
            elif unit != units.root:
                gathers.backward_end(unit)
                reduces.reduce(unit)
        for unit in units.all:
            # Those whose inputs need no gradient, and the root.
            gathers.backward_end(unit)
            reduces.reduce(unit)
        reduces.end()
    replay.moment(STEP, 0 if cpu_offload else needs.temporary)
    sharding = units.most_while_sharding(moved=workload.moved, shards_leave=cpu_offload)
    return footprint(
        replay,
        inputs(situation, trace),
        parameters=0 if cpu_offload else parameters,
        gradients=0 if cpu_offload else gradients,
        optimizer=0 if cpu_offload else needs.state,
        buffers=workload.buffers,
        loading=workload.buffers + sharding * stored.itemsize,
        host=host,
    )


def micro_steps(situation: Situation) -> Sequence[bool]:
    """Whether each micro-step that has to be looked at is the window's last."""
    return (True,) if situation.accumulation == 1 else (False, True)


def inputs(situation: Situation, trace: Trace) -> int:
    """Bytes of a window's micro-batches, which are on the device before its first forward."""
    return trace.inputs * situation.accumulation


def pieces(weights: Sequence[Weight], dtype: torch.dtype) -> list[Piece]:
    """Whole parameters for an optimizer to step on."""
    return [Piece(name=weight.name, shape=weight.shape, dtype=dtype) for weight in weights]


class _Units:
    """The units of a model by number, the root last."""

    def __init__(self, situation: Situation, workload: Workload, shards: int) -> None:
        weights = situation.anatomy.in_units()
        self.shards = shards
        self.root = len(weights) - 1
        self.all = range(len(weights))
        self.of_module = {path: number for number, path in enumerate(workload.units)} | {"": self.root}
        self.of_weight = {weight.name: number for number, unit in enumerate(weights) for weight in unit}
        self.numel = {weight.name: weight.numel for weight in situation.anatomy.weights}
        self.trained = [[weight.name for weight in unit if weight.trainable] for unit in weights]
        self.padded = [sum(weight.padded(shards) for weight in unit) for unit in weights]
        self.padded_trained = [sum(w.padded(shards) for w in unit if w.trainable) for unit in weights]
        self.whole = [sum(weight.numel for weight in unit) for unit in weights]

    def most_while_sharding(self, *, moved: bool, shards_leave: bool) -> int:
        """Numbers on the device at the most, while a unit after the other becomes shards and is let go.

        Args:
            moved: each unit is put there when its turn comes; else all of them are there from the beginning.
            shards_leave: they wait in host memory.
        """
        shares = [padded // self.shards for padded in self.padded]
        made = shares if shards_leave else accumulate(shares)
        return max(
            share + sum(self.whole[unit : unit + 1] if moved else self.whole[unit:]) for unit, share in enumerate(made)
        )


class _Gathers:
    """Which units are gathered."""

    def __init__(self, replay: Replay, units: _Units, computed: int, stored: int, reshard: bool) -> None:
        self._replay, self._units, self._reshard = replay, units, reshard
        self._item, self._cast = computed, computed != stored
        self._order: list[int] = []
        self._whole: set[int] = set()

    def begin(self) -> None:
        self._order = []

    def forward(self, unit: int) -> None:
        if unit in self._whole:
            return
        self._flat(unit)
        self._gather(unit)
        flat = self._replay.held("communication", f"flat {unit}")
        self._replay.drop("communication", f"flat {unit}")
        # The one before has been let go once this one was there.
        self._replay.hold("communication", "kept", flat)

    def forward_end(self, unit: int) -> None:
        if unit == self._units.root:
            self._replay.drop("communication", "kept")
        elif self._reshard:
            self._free(unit)
        self._order.append(unit)

    def backward(self, unit: int) -> None:
        if unit not in self._whole:
            self._flat(unit)
            self._gather(unit)
            self._replay.drop("communication", f"flat {unit}")
        before = self._order.index(unit) - 1 if unit in self._order else -1
        if before >= 0 and self._order[before] not in self._whole:
            self._flat(self._order[before])

    def backward_end(self, unit: int) -> None:
        self._free(unit)

    def _flat(self, unit: int) -> None:
        if self._units.shards > 1:
            self._replay.hold("communication", f"flat {unit}", self._units.padded[unit] * self._item)

    def _gather(self, unit: int) -> None:
        self._replay.hold("communication", f"unit {unit}", self._units.padded[unit] * self._item)
        self._whole.add(unit)

    def _free(self, unit: int) -> None:
        self._replay.drop("communication", f"unit {unit}")
        self._whole.discard(unit)


class _Reductions:
    """Where gradients are."""

    def __init__(
        self, replay: Replay, units: _Units, computed: int, reduced: int, stored: int, cpu_offload: bool
    ) -> None:
        self._replay, self._units, self._offload = replay, units, cpu_offload
        self._computed, self._reduced, self._stored = computed, reduced, stored
        self._now = True
        self._whole: dict[str, int] = {}
        self._done: set[int] = set()

    def begin(self, now: bool) -> None:
        """Of a micro-step in which gradients are reduced, or kept as they are."""
        self._now = now
        self._done = set()

    def arrived(self, name: str) -> None:
        if name not in self._whole:
            self._keep(name, self._units.numel[name] * self._computed)

    def reduce(self, unit: int) -> None:
        if unit in self._done:
            return
        self._done.add(unit)
        names = [name for name in self._units.trained[unit] if name in self._whole]
        if not self._now:
            # They wait in the dtype of the reduction.
            for name in names:
                self._keep(name, self._units.numel[name] * self._reduced)
            return
        if not names:
            return
        size = self._units.padded_trained[unit]
        self._replay.drop("communication", "reduced")
        self._replay.hold("communication", "reduced", size * self._reduced)
        for name in names:
            self._replay.drop("gradients", name)
            del self._whole[name]
        share = size // self._units.shards
        self._replay.hold("communication", "output", share * self._reduced)
        if not self._offload:
            self._replay.hold("gradients", f"shards {unit}", share * self._stored)
        self._replay.drop("communication", "output")

    def end(self) -> None:
        self._replay.drop("communication", "reduced")

    def _keep(self, name: str, size: int) -> None:
        self._replay.hold("gradients", name, size)
        self._whole[name] = size
