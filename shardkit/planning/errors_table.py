"""Predicted beside measured, on a terminal: three lines a choice."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.planning.amount import seconds
from shardkit.planning.measurement import PARTS, Measurement
from shardkit.planning.reason import named
from shardkit.planning.table import ABSENT, GAP, HEADS, amount, unit_of

TITLES = {**HEADS, "activations": "activations", "peak": "peak", "host": "host"}


def errors_table(measured: Sequence[Measurement]) -> str:
    """What was predicted, what was measured on the fullest rank, and by how much the prediction is off."""
    ran = [each for each in measured if not each.error]
    unit, name = unit_of([each.row for each in ran])
    parts = [part for part in PARTS if part != "host" and any(each.parts[part] for each in ran)]
    grid = [["", *(TITLES[part] for part in parts), "step"]]
    for each in ran:
        predicted = each.row.duration.seconds if each.row.duration else None
        grid += [
            [named(each.row)] + [""] * (len(parts) + 1),
            ["  predicted", *(amount(each.predicted(part), unit) for part in parts), _time(predicted)],
            ["  measured", *(amount(each.parts[part], unit) for part in parts), _time(each.seconds)],
            [
                "  error",
                *(_error(each.predicted(part), each.parts[part]) for part in parts),
                _error(predicted, each.seconds),
            ],
        ]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [f"predicted against measured, the fullest rank; in {name}"] if ran else []
    for first, *rest in grid if ran else []:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append(GAP.join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join([*lines, *(f"{named(each.row)} failed: {each.error}" for each in measured if each.error)])


def _time(duration: float | None) -> str:
    return ABSENT if duration is None else seconds(duration)


def _error(predicted: float | None, measured: float | None) -> str:
    """Of the prediction, as part of what was measured."""
    if predicted is None or measured is None:
        return ABSENT
    if not measured:
        return "0 %" if not predicted else ABSENT
    return f"{100 * (predicted - measured) / measured:+.1f} %".replace("+0.0 %", "0 %").replace("-0.0 %", "0 %")
