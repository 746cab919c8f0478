"""A comparison as one HTML file that fetches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardkit.compare.figures import figures
from shardkit.compare.markdown import sections
from shardkit.compare.results import Comparison
from shardkit.compare.tables import verdict_table, without_empty_columns
from shardkit.compare.terminal import NOTE
from shardkit.compare.verdict import Verdict, recommendation
from shardkit.pages.page import page as write

TEMPLATE = Path(__file__).parent / "page.html"


def page(comparison: Comparison, found: Mapping[str, Verdict], title: str) -> str:
    """The HTML text; what was measured is escaped, whatever it holds."""
    return write(
        TEMPLATE.read_text(encoding="utf-8"),
        brand="shardkit compare",
        title=title,
        pick=recommendation(found),
        sections=[("verdicts", "Verdicts"), ("figures", "Figures"), ("numbers", "Numbers"), ("commands", "Commands")],
        figures=figures(found),
        note=NOTE,
        overview=without_empty_columns(verdict_table(found), keep=(0, 1)),
        verdicts=list(found.values()),
        tables=sections(comparison, found),
        arms=comparison.arms,
    )
