"""A plan as one HTML file that fetches nothing."""

from __future__ import annotations

from pathlib import Path

from shardkit.pages.page import page as write
from shardkit.pages.table import Table
from shardkit.planning.amount import ranks, size
from shardkit.planning.bars import bars
from shardkit.planning.errors_table import grid
from shardkit.planning.figures import figures
from shardkit.planning.notes import notes, silent
from shardkit.planning.plan import Plan, Row
from shardkit.planning.planned import Planned
from shardkit.planning.table import FIRST, SECOND, by_world_size, columns, shown, unit_of

TEMPLATE = Path(__file__).parent / "page.html"


def page(found: Planned, command: str) -> str:
    """The HTML text; whatever names hold is escaped."""
    plan = found.plan
    rows = shown(plan, every=found.every)
    measured = list(found.measured.values())
    errors = _measured(grid(measured)) if any(not each.error for each in measured) else None
    sections = [("choices", "Choices"), ("figures", "Figures"), *([("measured", "Measured")] if errors else [])]
    return write(
        TEMPLATE.read_text(encoding="utf-8"),
        brand="shardkit plan",
        title=f"Plan of {plan.loaded.recipe.name} on {plan.device.name}",
        pick=found.reason.why,
        beside=found.reason.beside,
        sections=[*sections, ("notes", "Notes"), ("command", "Command")],
        figures=figures(bars(plan, rows, found.measured)),
        tables=[_table(plan, group) for group in by_world_size(rows)],
        silent=silent(plan),
        errors=errors,
        failed=[f"{each.row.choice.name}: {each.error}" for each in measured if each.error],
        notes=notes(plan, rows, found.machine, found.correction),
        command=command,
    )


def _table(plan: Plan, rows: list[Row]) -> Table:
    # What is decided comes first, then what it is made of.
    some = sorted(columns(rows), key=lambda column: column.group in ("exact", "estimate"))
    unit, first = unit_of(rows)[1], rows[0]

    def verdict(row: Row) -> str:
        return "-" if row.fits is None else "fits" if row.fits else "over"

    return Table(
        caption=f"{ranks(first.choice.world_size)} of {size(first.memory)}, micro-batches of {first.micro_batch_size}, "
        f"{first.accumulation} a step; in {unit}",
        head=("choice", "", *(f"{c.head}{' (exact)' if c.group == 'exact' else ''}" for c in some)),
        rows=[(_name(plan, row), verdict(row), *(column.cell(row) for column in some)) for row in rows],
    )


def _name(plan: Plan, row: Row) -> str:
    mark = FIRST if row is plan.recommended else SECOND if row is plan.runner_up else ""
    return f"{mark} {row.choice.name}".strip()


def _measured(found: list[list[str]]) -> Table:
    head, *rest = found
    return Table(
        caption="Predicted against measured, the fullest rank", head=tuple(head), rows=[tuple(r) for r in rest]
    )
