"""The figures of a plan's page: stacked bars, one figure a number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.pages.drawing import COLORS, Figure, Spec, axis, specification
from shardkit.planning.bars import PARTS, Bars

HEIGHT, LINE = 26, 14
# Pixels of a bar with its gap, and of each further line of its name.
LINES = "split(datum.label, ', ')"
# A name's options below it.


def figures(drawn: Sequence[Bars]) -> list[Figure]:
    """One for each number of ranks."""
    return [_figure(each) for each in drawn]


def _figure(drawn: Bars) -> Figure:
    amount = drawn.unit_name
    rows: list[Spec] = [
        {"choice": bar.name, "part": part, amount: count / drawn.unit, "order": PARTS.index(part)}
        for bar in drawn.bars
        for part, count in bar.parts.items()
    ]
    there = [part for part in PARTS if any(part in bar.parts for bar in drawn.bars)]
    y: Spec = {
        "field": "choice",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"labelExpr": LINES, "labelLimit": 230},
    }
    tooltip = [{"field": key} for key in ("choice", "part")] + [{"field": amount, "format": ".4g"}]
    colors = {"domain": there, "range": [COLORS[PARTS.index(part)] for part in there]}
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "tooltip": True, "height": 16},
            "encoding": {
                "y": y,
                "x": axis(amount, f"{amount} a rank"),
                "color": {
                    "field": "part",
                    "type": "nominal",
                    "scale": colors,
                    "legend": {"symbolType": "square", "columns": 2},
                },
                "order": {"field": "order"},
                "tooltip": tooltip,
            },
        },
        _ticks(
            [{"choice": bar.name, "with margin": bar.needs / drawn.unit} for bar in drawn.bars],
            y,
            "with margin",
            {"type": "tick", "thickness": 2, "size": 22, "color": "currentColor"},
        ),
    ]
    points = [{"choice": b.name, "measured": b.measured / drawn.unit} for b in drawn.bars if b.measured]
    if points:
        mark = {"type": "point", "size": 70, "strokeWidth": 2, "color": "currentColor"}
        layers.append(_ticks(points, y, "measured", mark))
    if drawn.limit is not None:
        layers.append(
            {
                "data": {"values": [{"limit": drawn.limit / drawn.unit}]},
                "mark": {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 2},
                "encoding": {"x": {"field": "limit", "type": "quantitative"}},
            }
        )
    # All bars have as much room as the one with the longest name.
    height = len(drawn.bars) * (HEIGHT + LINE * max(bar.name.count(", ") for bar in drawn.bars))
    return Figure(
        name=f"memory-{drawn.world_size}",
        title=drawn.title,
        caption=drawn.caption,
        spec=specification(rows, {"layer": layers, "height": height}),
    )


def _ticks(rows: list[Spec], y: Spec, field: str, mark: Spec) -> Spec:
    tooltip = [{"field": "choice"}, {"field": field, "format": ".4g"}]
    encoding = {"y": y, "x": {"field": field, "type": "quantitative"}, "tooltip": tooltip}
    return {"data": {"values": rows}, "mark": {**mark, "tooltip": True}, "encoding": encoding}
