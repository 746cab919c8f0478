"""A comparison as Markdown, for a pull request or a lab book."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardkit.compare.results import Comparison
from shardkit.compare.tables import (
    Table,
    communication_table,
    environment_table,
    equivalence_table,
    errors_table,
    memory_table,
    settings_table,
    speed_table,
    times_table,
    verdict_table,
    without_empty_columns,
)
from shardkit.compare.terminal import NOTE
from shardkit.compare.verdict import Verdict, recommendation


def markdown(comparison: Comparison, found: Mapping[str, Verdict], title: str) -> str:
    """The whole report as text."""
    return "\n".join(_lines(comparison, found, title)) + "\n"


def sections(comparison: Comparison, found: Mapping[str, Verdict]) -> list[Table]:
    """The tables below the verdicts, those with rows only, without columns that say nothing."""
    tables = [
        errors_table(found),
        equivalence_table(found),
        speed_table(found),
        memory_table(found),
        communication_table(found),
        times_table(found),
        settings_table(comparison, explained=False),
        settings_table(comparison, explained=True),
        environment_table(comparison),
    ]
    return [without_empty_columns(table) for table in tables if table.rows]


def _lines(comparison: Comparison, found: Mapping[str, Verdict], title: str) -> Iterator[str]:
    yield from (f"# {title}", "", f"**{recommendation(found)}**", "")
    yield from _table(without_empty_columns(verdict_table(found), keep=(0, 1)))
    yield from (f"{NOTE[:1].upper()}{NOTE[1:]}", "")
    for verdict in found.values():
        yield f"- **{_escape(verdict.arm)}**: {_escape(verdict.equivalence.sentence)}"
        if verdict.cause:
            yield f"  Cause, probably: {_escape(verdict.cause)}."
        if verdict.speed and not verdict.is_reference:
            yield f"  {_escape(verdict.speed.sentence[:1].upper() + verdict.speed.sentence[1:])}"
    for table in sections(comparison, found):
        yield from ("", f"## {table.caption}", "")
        yield from _table(table)
    yield from ("## Commands", "")
    for arm in comparison.arms:
        yield from (f"{arm.name}:", "", "```console", f"$ {arm.command}", "```", "")


def _table(table: Table) -> Iterator[str]:
    yield _row(table.head)
    yield _row(["---"] * len(table.head))
    yield from (_row([_escape(cell) for cell in row]) for row in table.rows)
    yield ""


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    """Text that Markdown takes as it is, in a table too."""
    for sign in ("\\", "|", "*", "_", "`", "<"):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
