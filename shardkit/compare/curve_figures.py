"""The figures of curves: the arms on each other, and how far each is from the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from shardkit.compare.equivalence import Curve
from shardkit.compare.tables import name_of
from shardkit.compare.verdict import Verdict
from shardkit.pages.drawing import COLORS, DASHES, Figure, Spec, axis, specification

# More points than pixels make a page heavy.
MOST_POINTS = 400
# Equal to the last bit has no place on a logarithmic axis.
ZERO = 1e-10


def overlay(found: Mapping[str, Verdict], name: str, title: str, place: str) -> Figure | None:
    rows = [
        {"arm": name_of(verdict), "step": step, "value": value}
        for verdict, curve in _curves(found, name)
        for step, value in _thin(curve.steps, curve.arm, ())
        if math.isfinite(value)
    ]
    if not rows:
        return None
    arms = _names(found, rows)
    mark: Spec = {"type": "line", "tooltip": True}
    encoding: Spec = {
        "x": _steps_axis(),
        "y": axis("value", title.lower(), scale={"zero": False}),
        **_of_arm(arms),
        # Equal curves lie on each other: the reference is a broad line, the others dashes over it.
        "strokeWidth": _by_arm(arms, 6, 2),
        "strokeOpacity": _by_arm(arms, 0.4, 1),
    }
    caption = "Each arm's run that is farthest from the reference. Curves on top of each other are equal to the eye."
    return Figure(
        name=place, title=title, caption=caption, spec=specification(rows, {"mark": mark, "encoding": encoding})
    )


def apart(found: Mapping[str, Verdict], name: str, title: str, place: str) -> Figure | None:
    others = [(verdict, curve) for verdict, curve in _curves(found, name) if not verdict.is_reference]
    if not others:
        return None
    rows = [row for verdict, curve in others for row in _differences(verdict, curve)]
    bands = [row for curve in _laws([curve for _, curve in others]) for row in _band(curve)]
    firsts = [
        {"arm": v.arm, "step": c.first, "difference": max(ZERO, min(c.at(c.first)[0], 1e3))}
        for v, c in others
        if c.first is not None
    ]
    arms = [verdict.arm for verdict, _ in others]
    y = axis("difference", "relative difference", scale={"type": "log"}, axis={"format": ".0e", "tickCount": 6})
    layers: list[Spec] = [
        {
            "data": {"values": bands},
            "mark": {
                "type": "area",
                "opacity": 0.16,
                "color": "#2F81D0",
                "line": {"color": "#2F81D0", "strokeDash": [4, 3], "strokeWidth": 1.5},
            },
            "encoding": {
                "x": _steps_axis(),
                "y": {**y, "field": "allowed"},
                "y2": {"field": "least"},
                "detail": {"field": "law"},
            },
        },
        {
            "mark": {"type": "line", "strokeWidth": 2, "tooltip": True},
            "encoding": {"x": _steps_axis(), "y": y, **_of_arm(arms)},
        },
        {
            "data": {"values": firsts},
            "mark": {"type": "point", "shape": "diamond", "size": 160, "strokeWidth": 2.5, "tooltip": True},
            "encoding": {"x": _steps_axis(), "y": y, "color": _of_arm(arms)["color"]},
        },
    ]
    caption = (
        "The band is what rounding explains, as far as it explains anything; a diamond is the first step above it. "
        f"A difference of zero, equal to the last bit, is drawn at {ZERO:g}."
    )
    return Figure(name=place, title=title, caption=caption, spec=specification(rows, {"layer": layers}))


def _curves(found: Mapping[str, Verdict], name: str) -> Iterator[tuple[Verdict, Curve]]:
    for verdict in found.values():
        for curve in verdict.equivalence.curves:
            if curve.name == name:
                yield verdict, curve


def _differences(verdict: Verdict, curve: Curve) -> Iterator[Spec]:
    important = () if curve.first is None else (curve.first,)
    for step, difference in _thin(curve.steps, curve.difference, important):
        if math.isfinite(difference):
            yield {"arm": verdict.arm, "step": step, "difference": max(ZERO, difference)}


def _laws(curves: Sequence[Curve]) -> list[Curve]:
    """One curve of those that have the same bound."""
    return list({tuple(curve.allowed): curve for curve in curves}.values())


def _band(curve: Curve) -> Iterator[Spec]:
    for step, allowed in _thin(curve.steps, curve.allowed, ()):
        if math.isfinite(allowed):
            yield {"step": step, "allowed": allowed, "least": ZERO, "law": f"{curve.allowed[0]:.3e}"}


def _thin(steps: Sequence[int], values: Sequence[float], keep: Sequence[int]) -> list[tuple[int, float]]:
    """Of many points the first twenty, every so many, and those to keep: faults show at the beginning."""
    every = max(1, math.ceil(len(steps) / MOST_POINTS))
    return [(s, v) for i, (s, v) in enumerate(zip(steps, values, strict=True)) if i % every == 0 or i < 20 or s in keep]


def _names(found: Mapping[str, Verdict], rows: Sequence[Spec]) -> list[str]:
    there = {row["arm"] for row in rows}
    return [name for verdict in found.values() if (name := name_of(verdict)) in there]


def _by_arm(arms: Sequence[str], reference: float, other: float) -> Spec:
    """One value for the reference, another for all others."""
    values = [reference if arm.endswith("(reference)") else other for arm in arms]
    return {
        "field": "arm",
        "type": "ordinal",
        "sort": None,
        "scale": {"type": "ordinal", "domain": list(arms), "range": values},
    }


def _of_arm(arms: Sequence[str]) -> Spec:
    """Colour and dashes: neither alone has to tell arms apart."""
    many = range(len(arms))
    return {
        "color": {
            "field": "arm",
            "type": "ordinal",
            "sort": None,
            "scale": {"domain": list(arms), "range": [COLORS[i % len(COLORS)] for i in many]},
        },
        "strokeDash": {
            "field": "arm",
            "type": "ordinal",
            "sort": None,
            "scale": {"domain": list(arms), "range": [DASHES[i % len(DASHES)] for i in many]},
        },
    }


def _steps_axis() -> Spec:
    return {
        "field": "step",
        "type": "quantitative",
        "title": "optimizer step",
        "scale": {"nice": False},
        "axis": {"tickMinStep": 1, "format": "d"},
    }
