"""What the figures of a plan draw: a bar a choice, what it is made of, and where the device ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardkit.planning.amount import ranks, size, unit_of_bytes
from shardkit.planning.measurement import Measurement
from shardkit.planning.plan import Plan, Row
from shardkit.planning.table import FIRST, SECOND, by_world_size

OFFLOADED = "offloaded"
# On a CPU: what waits in host memory, which is the device's own.
PARTS = (
    "parameters",
    "masters",
    "optimizer",
    "gradients",
    "buffers",
    "communication",
    "activations",
    OFFLOADED,
)
FAR = 3.0
# A device that has so many times what is needed at the most would leave nothing to see of the bars.


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One choice; bytes of its fullest rank at its peak."""

    name: str
    # With a mark where it is recommended.
    parts: dict[str, int]
    # PARTS.
    needs: int
    # The peak as measurements correct it, and the margin on it.
    measured: int | None
    # Peak of a run.


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The choices of one number of ranks."""

    title: str
    caption: str
    world_size: int
    unit: int
    unit_name: str
    bars: list[Bar]
    limit: int | None
    # Bytes of the device that tensors get; None = far more than any choice needs.


def bars(plan: Plan, rows: Sequence[Row], measured: Mapping[tuple[str, int], Measurement]) -> list[Bars]:
    """What is drawn of the rows whose peak is known, by number of ranks."""
    return [_bars(plan, group, measured) for group in by_world_size([row for row in rows if row.peak is not None])]


def _bars(plan: Plan, rows: Sequence[Row], measured: Mapping[tuple[str, int], Measurement]) -> Bars:
    found = [_bar(plan, row, measured.get((row.choice.name, row.choice.world_size))) for row in rows]
    world_size, memory = rows[0].choice.world_size, rows[0].memory
    limit = memory - plan.device.reserved
    most = max(bar.needs for bar in found)
    near = limit <= FAR * most
    caption = (
        f"The peak of the fullest rank and what it is made of; the tick is the peak with {plan.device.margin:.0%} of "
        f"margin. {size(memory)} a rank, of which tensors get {size(max(0, limit))}: "
        + ("the dashed line." if near else "far to the right of what is drawn.")
    )
    unit, name = unit_of_bytes(limit if near else most)
    if any(bar.measured for bar in found):
        caption += " Circles were measured."
    return Bars(
        title=f"Memory of a rank, {ranks(world_size)}",
        caption=caption,
        world_size=world_size,
        unit=unit,
        unit_name=name,
        bars=found,
        limit=limit if near else None,
    )


def _bar(plan: Plan, row: Row, measured: Measurement | None) -> Bar:
    assert row.footprint is not None and row.peak is not None
    parts: dict[str, int] = {**row.footprint.at_peak}
    parts[OFFLOADED] = row.footprint.host if plan.device.kind == "cpu" else 0
    mark = f"{FIRST} " if row is plan.recommended else f"{SECOND} " if row is plan.runner_up else ""
    return Bar(
        name=f"{mark}{row.choice.name}",
        parts={part: parts[part] for part in PARTS if parts.get(part)},
        needs=round(row.peak * (1 + plan.device.margin)),
        measured=measured.parts.get("peak") if measured and not measured.error else None,
    )
