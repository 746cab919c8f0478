"""A comparison on a terminal: one table of at most 100 columns, and a sentence on each arm."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table as Drawn

from shardkit.compare.results import Comparison
from shardkit.compare.tables import verdict_table, without_empty_columns
from shardkit.compare.verdict import Verdict, recommendation, verdicts

WIDTH = 100
NOTE = "speed: items/s as part of the reference's, ~ no difference shown. MiB/step: in collectives."


def table(comparison: Comparison, found: Mapping[str, Verdict] | None = None) -> str:
    """The verdicts as text of at most 100 columns; `found`: where they are known already."""
    found = found or verdicts(comparison)
    parts = [_drawn(found), *(_told(verdict) for verdict in found.values()), _wrap(recommendation(found))]
    return "\n".join(parts)


def _drawn(found: Mapping[str, Verdict]) -> str:
    shown = without_empty_columns(verdict_table(found), keep=(0, 1))
    drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(shown.head):
        drawn.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
    for row in shown.rows:
        drawn.add_row(*row)
    console = Console(width=WIDTH, file=io.StringIO(), force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(drawn, markup=False)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*filter(None, lines), "", NOTE, ""])


def _told(verdict: Verdict) -> str:
    lines = [f"{verdict.arm}: {verdict.equivalence.sentence}"]
    if verdict.cause:
        lines.append(f"  cause, probably: {verdict.cause}.")
    if verdict.speed and not verdict.is_reference:
        lines.append(f"  {verdict.speed.sentence}")
    lines += [f"  a run {error}" for error in verdict.errors]
    return "\n".join(_wrap(line) for line in lines)


def _wrap(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
