"""Predicted beside measured, on a terminal: three lines a choice."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.planning.amount import seconds
from shardkit.planning.measurement import PARTS, Measurement
from shardkit.planning.reason import named
from shardkit.planning.table import ABSENT, GAP, HEADS, amount, unit_of

TITLES = {**HEADS, "activations": "activations", "peak": "peak", "host": "host"}
PREDICTED = " predicted"


def errors_table(measured: Sequence[Measurement]) -> str:
    """What was predicted, what was measured on the fullest rank, and by how much the prediction is off."""
    cells = [row for each in grid(measured) for row in _below(each)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["predicted against measured, the fullest rank"] if len(cells) > 1 else []
    for first, *rest in cells if lines else []:
        found = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append(GAP.join([first.ljust(widths[0]), *found]).rstrip())
    return "\n".join([*lines, *(f"{named(each.row)} failed: {each.error}" for each in measured if each.error)])


def grid(measured: Sequence[Measurement]) -> list[list[str]]:
    """The head, and three rows for each choice that ran: predicted, measured, error."""
    ran = [each for each in measured if not each.error]
    unit, name = unit_of([each.row for each in ran])
    parts = [part for part in PARTS if part != "host" and any(each.parts[part] for each in ran)]
    cells = [[f"in {name}", *(TITLES[part] for part in parts), "step"]]
    for each in ran:
        predicted = each.row.duration.seconds if each.row.duration else None
        who = named(each.row)
        cells += [
            [f"{who}{PREDICTED}", *(amount(each.predicted(p), unit) for p in parts), _time(predicted)],
            ["measured", *(amount(each.parts[p], unit) for p in parts), _time(each.seconds)],
            ["error", *(_error(each.predicted(p), each.parts[p]) for p in parts), _error(predicted, each.seconds)],
        ]
    return cells


def _below(row: list[str]) -> list[list[str]]:
    """The name of a choice on a line of its own."""
    first, *rest = row
    name, predicted, _ = first.partition(PREDICTED)
    if not predicted:
        return [[f"  {first}", *rest]]
    return [[name, *[""] * len(rest)], [f" {PREDICTED}", *rest]]


def _time(duration: float | None) -> str:
    return ABSENT if duration is None else seconds(duration)


def _error(predicted: float | None, measured: float | None) -> str:
    """Of the prediction, as part of what was measured."""
    if predicted is None or measured is None:
        return ABSENT
    if not measured:
        return "0 %" if not predicted else ABSENT
    return f"{100 * (predicted - measured) / measured:+.1f} %".replace("+0.0 %", "0 %").replace("-0.0 %", "0 %")
