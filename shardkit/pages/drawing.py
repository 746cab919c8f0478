"""How the figures of a page are drawn: colours, axes, and what a Vega-Lite specification has around its marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # A name; nothing is fetched from it.
# Each has a contrast of 3 or more on white and on the dark page (WCAG 2.2, 1.4.11); dashes tell arms apart as well.
COLORS = ["#2F81D0", "#D9730D", "#1A9E6B", "#D1495B", "#A05FC4", "#1497A6", "#8A8A00", "#7D8590"]
DASHES = [[1, 0], [6, 3], [2, 3], [8, 3, 2, 3], [4, 2], [1, 2], [10, 4], [3, 6]]
# The page's own colour of text, so that one drawing serves the light and the dark page.
INK = "currentColor"
CONFIG: Spec = {
    "background": "transparent",
    "view": {"stroke": None},
    "font": "system-ui, sans-serif",
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "tickColor": INK,
        "domainColor": INK,
        "gridColor": INK,
        "gridOpacity": 0.13,
        "domainOpacity": 0.4,
        "tickOpacity": 0.4,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 140,
        "labelOverlap": True,
    },
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "orient": "top",
        "columns": 2,
        "symbolType": "stroke",
        "labelFontSize": 12,
        "symbolStrokeWidth": 3,
        "labelLimit": 170,
        "title": None,
    },
    "text": {"fill": INK},
    "rule": {"color": INK},
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing, and what it says to whoever cannot see it."""

    name: str
    # Of its place in the page.
    title: str
    caption: str
    spec: Spec


def axis(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def specification(rows: list[Spec], drawing: Spec) -> Spec:
    return {
        "$schema": SCHEMA,
        "config": CONFIG,
        "width": "container",
        "height": 280,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": rows},
        **drawing,
    }
