"""The figures of what arms cost: throughput, memory and communication."""

from __future__ import annotations

from collections.abc import Mapping

from shardkit.compare.tables import MIB, name_of
from shardkit.compare.verdict import Verdict
from shardkit.pages.drawing import COLORS, Figure, Spec, axis, specification

SOURCES = ["measured", "theory", "least"]
_PALER: Spec = {"domain": SOURCES, "range": [1, 0.6, 0.3]}
SQUARES: Spec = {"symbolType": "square", "columns": 1}


def throughput(found: Mapping[str, Verdict]) -> Figure | None:
    rows = [
        {"arm": name_of(v), "value": i.value, "low": i.low, "high": i.high}
        for v in found.values()
        if v.speed and (i := v.speed.items_per_second)
    ]
    return _intervals(rows, "throughput", "Throughput", "items per second") if rows else None


def ratios(found: Mapping[str, Verdict]) -> Figure | None:
    rows = [
        {"arm": name_of(v), "value": i.value, "low": i.low, "high": i.high}
        for v in found.values()
        if v.speed and (i := v.speed.ratio)
    ]
    if not rows:
        return None
    return _intervals(
        rows, "speed-ratio", "Speed beside the reference", "items/s, as part of the reference's", one=True
    )


def _intervals(rows: list[Spec], name: str, title: str, what: str, *, one: bool = False) -> Figure:
    y: Spec = {"field": "arm", "type": "nominal", "sort": None, "title": None}
    scale = {"zero": not one}
    ticks: Spec = {"tickCount": 5}
    layers: list[Spec] = [
        {
            "mark": {"type": "rule", "strokeWidth": 3, "color": COLORS[0]},
            "encoding": {"y": y, "x": axis("low", what, scale=scale, axis=ticks), "x2": {"field": "high"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 110, "color": COLORS[3], "opacity": 1, "tooltip": True},
            "encoding": {
                "y": y,
                "x": axis("value", what, scale=scale, axis=ticks),
                "tooltip": [{"field": key} for key in ("arm", "value", "low", "high")],
            },
        },
    ]
    if one:
        layers.insert(
            0,
            {
                "data": {"values": [{"one": 1}]},
                "mark": {"type": "rule", "strokeDash": [4, 3]},
                "encoding": {"x": {"field": "one", "type": "quantitative"}},
            },
        )
    caption = "Points with 95 % bootstrap intervals over repeats and steps, without the warm-up."
    if one:
        caption += " An interval that holds 1 shows no difference."
    spec = specification(rows, {"layer": layers, "height": 34 * len(rows)})
    return Figure(name=name, title=title, caption=caption, spec=spec)


def memory(found: Mapping[str, Verdict]) -> Figure | None:
    rows = [
        {"arm": name_of(verdict), "kind": label, "MiB": count / MIB}
        for verdict in found.values()
        for label, count in (
            ("device, allocated", verdict.costs.memory.allocated),
            ("device, reserved", verdict.costs.memory.reserved),
            ("host, resident", verdict.costs.memory.host),
        )
        if count is not None
    ]
    if not rows:
        return None
    encoding: Spec = {
        "y": {"field": "arm", "type": "nominal", "sort": None, "title": None},
        "yOffset": {"field": "kind"},
        "x": axis("MiB", "MiB"),
        "color": {"field": "kind", "type": "nominal", "scale": {"range": COLORS}, "legend": SQUARES},
    }
    spec = specification(
        rows, {"mark": {"type": "bar", "tooltip": True}, "encoding": encoding, "height": _height(rows)}
    )
    return Figure(name="memory", title="Peak memory of a rank", caption="The rank that used most.", spec=spec)


def communication(found: Mapping[str, Verdict]) -> Figure | None:
    rows = [
        {"arm": name_of(verdict), "collective": each.kind, "source": source, "MiB": count / MIB}
        for verdict in found.values()
        for each in verdict.costs.communication
        for source, count in (("measured", each.bytes), ("theory", each.theory_bytes), ("least", each.least_bytes))
        if count
    ]
    if not rows:
        return None
    encoding: Spec = {
        "y": {"field": "arm", "type": "nominal", "sort": None, "title": None},
        "yOffset": {"field": "source", "sort": SOURCES},
        "x": axis("MiB", "MiB an optimizer step"),
        "color": {"field": "collective", "type": "nominal", "scale": {"range": COLORS}, "legend": SQUARES},
        # The caption says it; a legend of its own would not fit a phone.
        "opacity": {"field": "source", "type": "ordinal", "scale": _PALER, "legend": None},
    }
    spec = specification(
        rows, {"mark": {"type": "bar", "tooltip": True}, "encoding": encoding, "height": _height(rows)}
    )
    caption = (
        "Bytes of the full tensors that take part in one optimizer step. From above, each paler than the one before: "
        "measured, what this backend has to move by theory, and the least that such a partition needs."
    )
    return Figure(name="communication", title="Communication", caption=caption, spec=spec)


def _height(rows: list[Spec]) -> int:
    """Pixels for the bars of all arms: 14 each, and 12 between arms."""
    most = max(len({row.get("kind", row.get("source")) for row in rows if row["arm"] == arm}) for arm in _arms(rows))
    return len(_arms(rows)) * (14 * most + 12)


def _arms(rows: list[Spec]) -> set[str]:
    return {row["arm"] for row in rows}
