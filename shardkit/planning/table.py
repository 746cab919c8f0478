"""A plan on a terminal: a row a choice, what it recommends and why, and what its numbers are."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from shardkit.engines.footprint import Part
from shardkit.planning.amount import ranks, seconds, size, unit_of_bytes
from shardkit.planning.notes import notes, silent
from shardkit.planning.plan import Plan, Row
from shardkit.planning.reason import Reason, moved_bytes

ABSENT = "-"
HEADS = {
    "parameters": "params",
    "masters": "masters",
    "optimizer": "optimizer",
    "gradients": "grads",
    "buffers": "buffers",
}
FIRST, SECOND = "*", "+"
LEGEND = f"{FIRST} recommended   {SECOND} runner-up"
GAP = "  "
UNKNOWN_WIDTH = 120
# Columns where there is no terminal.


@dataclass(frozen=True, kw_only=True)
class Column:
    """One number of a row."""

    head: str
    group: str
    # exact, estimate, or "" for what follows from them.
    cell: Callable[[Row], str]


def table(plan: Plan, reason: Reason, *, every: bool = False, machine: str = "", correction: str = "") -> str:
    """The whole plan as text, as wide as the terminal is.

    Args:
        plan: the plan.
        reason: why it recommends what it does.
        every: show all choices; by default those with recomputed blocks only where that decides whether they fit.
        machine: where the device's numbers are from.
        correction: which measurements correct the peaks.
    """
    width = shutil.get_terminal_size((UNKNOWN_WIDTH, 24)).columns
    rows = shown(plan, every=every)
    parts = [_wrapped(f"{plan.parameters:,} parameters, on {plan.device.name}", width)]
    parts += [_group(plan, group, width) for group in by_world_size(rows)]
    if rows:
        parts.append(LEGEND if plan.recommended else "")
    hidden = sum(row.footprint is not None for row in plan.rows) - len(rows)
    if hidden:
        text = f"{hidden} more with recomputed blocks, which change nothing of what fits: --all"
        parts.append(_wrapped(text, width))
    parts += [_wrapped(line, width) for line in silent(plan)]
    parts += ["", _wrapped(reason.why, width), _wrapped(reason.beside, width), ""]
    parts += [_wrapped(note, width) for note in notes(plan, rows, machine, correction)]
    return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines())


def shown(plan: Plan, *, every: bool = False) -> list[Row]:
    """The rows with numbers that a reader is shown, in the plan's order."""
    known = [row for row in plan.rows if row.footprint is not None]
    if every:
        return known
    bare = {_bare(row): row.fits for row in known if row.choice.activation_checkpointing is None}
    return [
        row
        for row in known
        if row.choice.activation_checkpointing is None
        or row in (plan.recommended, plan.runner_up)
        or (_bare(row) in bare and bare[_bare(row)] != row.fits)
    ]


def by_world_size(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of each number of ranks together."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.choice.world_size, []).append(row)
    return list(groups.values())


def columns(rows: Sequence[Row]) -> list[Column]:
    """Those that say something of these rows; all in one unit."""
    unit, _ = unit_of(rows)

    def part(key: str) -> Callable[[Row], str]:
        return lambda row: amount(getattr(row.footprint, key), unit)

    def at_peak(key: Part) -> Callable[[Row], str]:
        return lambda row: (
            amount(row.footprint.at_peak.get(key, 0), unit) if row.footprint and row.peak is not None else ABSENT
        )

    found = [
        *[Column(head=h, group="exact", cell=part(key)) for key, h in HEADS.items()],
        Column(head="activations", group="estimate", cell=at_peak("activations")),
        Column(head="comm.", group="estimate", cell=at_peak("communication")),
        Column(head="peak", group="estimate", cell=lambda row: amount(row.peak, unit)),
        Column(head="needs", group="", cell=lambda row: _at_least(row, amount(row.needs, unit))),
        Column(head="fits", group="", cell=_fits),
        Column(head="micro", group="", cell=_largest),
        Column(head="moved", group="a step", cell=_moved),
        Column(head="time", group="a step", cell=lambda row: seconds(row.duration.seconds) if row.duration else ABSENT),
    ]
    always = {"params", "peak", "needs", "fits"}
    return [c for c in found if c.head in always or any(c.cell(row) not in ("0", ABSENT) for row in rows)]


def unit_of(rows: Sequence[Row]) -> tuple[int, str]:
    """The unit that suits these rows, and its name."""
    return unit_of_bytes(max((row.needs or row.peak or 0 for row in rows), default=0))


def _bare(row: Row) -> tuple[str, int, str]:
    return row.choice.backend, row.choice.world_size, str(dict(row.choice.options))


def _group(plan: Plan, rows: list[Row], width: int) -> str:
    """The choices of one number of ranks: one table, or where that is too wide the answers before the parts."""
    first = rows[0]
    head = (
        f"{ranks(first.choice.world_size)} of {size(first.memory)}, micro-batches of {first.micro_batch_size}, "
        f"{first.accumulation} a step; in {unit_of(rows)[1]}"
    )
    every = columns(rows)
    whole = _drawn(plan, rows, every)
    if len(whole[0]) <= width:
        return "\n".join([head, *whole, ""])
    parts = [column for column in every if column.group in ("exact", "estimate")]
    rest = [column for column in every if column not in parts]
    tables = [_drawn(plan, rows, some) for half in (rest, parts) for some in _packed(plan, rows, half, width)]
    return "\n".join([head, *(line for lines in tables for line in [*lines, ""])])


def _packed(plan: Plan, rows: list[Row], some: list[Column], width: int) -> Iterator[list[Column]]:
    """As many columns together as fit, at least one."""
    while some:
        count = next((n for n in range(len(some), 1, -1) if len(_drawn(plan, rows, some[:n])[0]) <= width), 1)
        yield some[:count]
        some = some[count:]


def _drawn(plan: Plan, rows: list[Row], some: Sequence[Column]) -> list[str]:
    """Lines of a table; all as wide as the first."""
    cells = [[column.cell(row) for row in rows] for column in some]
    widths = [max(map(len, [column.head, *found])) for column, found in zip(some, cells, strict=True)]
    marks = [FIRST if row is plan.recommended else SECOND if row is plan.runner_up else " " for row in rows]
    names = [_name(row, mark) for row, mark in zip(rows, marks, strict=True)]
    left = max(len("  choice"), *(len(line) for lines in names for line in lines))
    lines = [
        GAP.join([" " * left, *_groups(some, widths)]),
        GAP.join(["  choice".ljust(left), *(c.head.rjust(w) for c, w in zip(some, widths, strict=True))]),
        "-" * (left + sum(widths) + len(GAP) * len(some)),
    ]
    for number, name in enumerate(names):
        values = [found[number].rjust(w) for found, w in zip(cells, widths, strict=True)]
        for text, *shown in zip_longest(name, *([value] for value in values), fillvalue=""):
            lines.append(GAP.join([text.ljust(left), *shown]))
    if not any(column.group for column in some):
        del lines[0]
    return lines


def _name(row: Row, mark: str) -> list[str]:
    """The backend, and a line for each option."""
    backend, *options = row.choice.name.split(", ")
    return [f"{mark} {backend}", *(f"  {option}" for option in options)]


def _groups(some: Sequence[Column], widths: Sequence[int]) -> list[str]:
    """What columns say together, over the first of them."""
    found: list[tuple[str, int]] = []
    for column, width in zip(some, widths, strict=True):
        if found and found[-1][0] == column.group:
            found[-1] = (column.group, found[-1][1] + len(GAP) + width)
        else:
            found.append((column.group, width))
    return [f" {group} ".center(width, "-") if group else " " * width for group, width in found]


def amount(count: int | None, unit: int) -> str:
    """A count of bytes in a unit, with three digits or so."""
    if count is None:
        return ABSENT
    amount = count / unit
    if not count:
        return "0"
    return "<0.01" if amount < 0.005 else f"{amount:.2f}" if amount < 10 else f"{amount:,.1f}"


def _fits(row: Row) -> str:
    if row.needs is None:
        return ABSENT
    left = row.memory - row.needs
    return f"{size(left)} free" if left >= 0 else _at_least(row, f"{size(-left)} over")


def _at_least(row: Row, text: str) -> str:
    """Where activations are not known, what is needed without them."""
    return f"at least {text}" if row.unknown and text != ABSENT else text


def _largest(row: Row) -> str:
    found = row.largest_micro_batch_size
    return ABSENT if found is None else str(found) if found else "none"


def _moved(row: Row) -> str:
    moved = moved_bytes(row)
    return ABSENT if moved is None else size(moved) if moved else "0"


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, max(40, width), subsequent_indent="  ", break_on_hyphens=False) if text else ""
