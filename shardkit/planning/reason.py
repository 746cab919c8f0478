"""Why a plan recommends what it recommends, in two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.planning.amount import listed, ranks, seconds, size
from shardkit.planning.device import Device
from shardkit.planning.nearest import Nearest, nearest
from shardkit.planning.plan import Plan, Row

TOLD = 3
# Choices that do not fit and are named with what they lack.
EQUAL = 0.01
# Step times that are closer, as part of each other, are told as equal: they are estimates.


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Two sentences."""

    why: str
    # Why the recommended choice is the cheapest that fits, or by how much the nearest misses.
    beside: str
    # What the runner-up costs more, or what would fit.
    nearest: Nearest | None = None
    # What would fit, where nothing does.

    def __str__(self) -> str:
        return f"{self.why} {self.beside}".strip()


def reason(plan: Plan, devices: Sequence[Device] = ()) -> Reason:
    """The two sentences on a plan.

    Args:
        plan: the plan.
        devices: those to name where nothing fits.
    """
    if plan.recommended is not None:
        return Reason(why=_why(plan, plan.recommended), beside=_runner_up(plan, plan.recommended))
    known = [row for row in plan.rows if row.fits is not None and not row.unknown]
    if known:
        return _nothing_fits(plan, known, devices)
    accepted = [row for row in plan.rows if not row.refused]
    why = "Nothing is recommended: of no backend is it known what it needs."
    if not accepted:
        why = "Nothing is recommended: every backend refuses the recipe."
    elif all(row.fits is False for row in accepted):
        closest = min(accepted, key=_over)
        why = f"Nothing fits: the nearest, {named(closest)}, needs {_needed(closest)} of {size(closest.memory)}."
    return Reason(why=why, beside="")


def named(row: Row, beside: Row | None = None) -> str:
    """ "zero2 on 4 ranks", or "zero2" beside a row of as many; what is set over the preset follows it in brackets."""
    backend, _, settings = row.choice.name.partition(", ")
    name = f"{backend} ({settings})" if settings else backend
    same = beside is not None and beside.choice.world_size == row.choice.world_size
    return name if same else f"{name} on {ranks(row.choice.world_size)}"


def _why(plan: Plan, row: Row) -> str:
    before = plan.rows[: plan.rows.index(row)]
    lacking = [other for other in before if other.fits is False]
    fits = f"it needs {size(row.needs or 0)} of {size(row.memory)}"
    unknown = any(other.fits is None and not other.refused for other in before)
    cheapest = "the cheapest that is known to fit" if unknown else "the cheapest that fits"
    if not lacking:
        return f"{named(row)} is {cheapest}: {fits}, and it comes first by ranks, sharding and step time."
    # The nearest on the ladder; with recomputation only where that is recommended too.
    bare = [o for o in lacking if o.choice.activation_checkpointing == row.choice.activation_checkpointing]
    told = (bare or lacking)[-TOLD:]
    words = [f"{named(o, row)} would need {_needed(o)} ({size(_over(o))} over)" for o in told]
    rest = len(lacking) - len(told)
    more = f"; {rest} more that would be cheaper do not fit either" if rest else ""
    return f"{named(row)} is {cheapest}: {fits}, while {listed(words)}{more}."


def _runner_up(plan: Plan, first: Row) -> str:
    second = plan.runner_up
    if second is None:
        # Recomputing what fits as it is only costs.
        others = any(row.fits for row in plan.rows if row is not first)
        return "Nothing else fits, but with recomputed activations." if others else "Nothing else fits."
    costs = _costs(first, second)
    said = listed(costs) if costs else "costs as much"
    return f"The runner-up, {named(second, first)}, needs {size(second.needs or 0)} and {said}."


def _costs(first: Row, second: Row) -> list[str]:
    costs = []
    if second.choice.world_size > first.choice.world_size:
        costs.append(f"takes {ranks(second.choice.world_size)} instead of {first.choice.world_size}")
    if second.choice.activation_checkpointing != first.choice.activation_checkpointing:
        costs.append("recomputes activations" if second.choice.activation_checkpointing else "recomputes nothing")
    if first.duration and second.duration:
        factor = second.duration.seconds / first.duration.seconds
        times = f"({seconds(second.duration.seconds)} instead of {seconds(first.duration.seconds)})"
        if factor > 1 + EQUAL:
            costs.append(f"takes an estimated {factor:.3g} times as long a step {times}")
        elif factor < 1 - EQUAL:
            costs.append(f"makes a step an estimated {1 / factor:.3g} times as fast {times}")
    moved, less = moved_bytes(second), moved_bytes(first)
    if moved is not None and less is not None and moved > less:
        costs.append(f"moves {size(moved)} a step" + (f" instead of {size(less)}" if less else ""))
    if not costs and second.rung > first.rung:
        costs.append("is a step further up the ladder")
    return costs


def moved_bytes(row: Row) -> int | None:
    """Bytes of the full tensors that take part in a step's collectives; None = not known."""
    if row.communication is None:
        return None
    return sum(volume.bytes for volume in row.communication.values())


def _nothing_fits(plan: Plan, known: Sequence[Row], devices: Sequence[Device]) -> Reason:
    closest = min(known, key=_over)
    found = nearest(plan, closest, devices)
    why = (
        f"Nothing fits: the nearest, {named(closest)}, needs {size(closest.needs or 0)} of {size(closest.memory)}, "
        f"{size(_over(closest))} too much."
    )
    beside = f"It fits {found.says}." if found else "No setting that was looked at makes it fit."
    return Reason(why=why, beside=beside, nearest=found)


def _needed(row: Row) -> str:
    """Where activations are not known, what is needed without them."""
    return f"{'at least ' if row.unknown else ''}{size(row.needs or 0)}"


def _over(row: Row) -> int:
    return (row.needs or 0) - row.memory


__all__ = ["Reason", "moved_bytes", "named", "nearest", "reason"]
