"""The nearest setting that fits, for a choice that does not: what changes least comes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardkit.planning.amount import ranks, size
from shardkit.planning.device import Device
from shardkit.planning.plan import Plan, Row

MICRO_BATCH = "batch.micro_batch_size"


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """A change that makes a choice fit."""

    says: str
    # What follows "fits": "with batch.micro_batch_size=8", "on 8 ranks with backend=zero2 (needs 3.1 GiB)".
    overrides: tuple[str, ...] = ()
    # After the words that the plan was made with.
    world_size: int
    row: Row | None = None
    # The choice that fits; None = none does, on this device.
    micro_batch_size: int | None = None
    # Another than the recipe's.
    memory: int = 0
    # Bytes of the device that would do; 0 = this one does.


def nearest(plan: Plan, row: Row, devices: Sequence[Device] = ()) -> Nearest | None:
    """The smallest change that makes a row fit; None where nothing is known that would.

    In this order: a smaller micro-batch, recomputed activations, another backend on as many ranks, these with a smaller
    micro-batch, more ranks, a device with more memory. A row that fits by the plan, and yet ran out of memory, is
    given the first of these that needs less than it.

    Args:
        plan: what the row is of.
        row: what does not fit.
        devices: those to name, where none of the plan's choices fits.
    """
    here = [other for other in plan.rows if other.choice.world_size == row.choice.world_size and other != row]
    same = [other for other in here if _recomputes_more(row, other)]
    lower = [other for other in (*same, *here) if not row.fits]
    return (
        _smaller(row, row)
        or _first(_less(same, row), row)
        or _first(_less(here, row), row)
        or next((found for other in lower if (found := _smaller(other, row))), None)
        or _more_ranks(plan, row)
        or _other_device(row, here, devices)
    )


def _recomputes_more(row: Row, other: Row) -> bool:
    bare = replace(other.choice, activation_checkpointing=row.choice.activation_checkpointing)
    return bare == row.choice and row.choice.activation_checkpointing is None


def _smaller(row: Row, than: Row) -> Nearest | None:
    largest = row.largest_micro_batch_size
    if largest and row.fits:  # and yet it ran out: what the plan says fits is not enough
        items = row.micro_batch_size * row.accumulation
        largest = max((n for n in range(1, row.micro_batch_size) if items % n == 0), default=0)
    if not largest or largest >= row.micro_batch_size:
        return None
    change = f"{MICRO_BATCH}={largest}"
    return Nearest(
        says=f"with {' '.join([*_changes(row, than), change])}",
        overrides=(*row.overrides, change),
        world_size=row.choice.world_size,
        row=row,
        micro_batch_size=largest,
    )


def _changes(row: Row, than: Row) -> list[str]:
    """The words of a row that another does not have."""
    words = [word for word in row.overrides if word not in than.overrides]
    backend = f"backend={row.choice.backend}"
    # The recipe's own has no word for it.
    return words if row.choice.backend == than.choice.backend or backend in words else [backend, *words]


def _less(rows: Iterable[Row], row: Row) -> list[Row]:
    """Those that fit; beside a row that fits, those that need less."""
    found = [other for other in rows if other.fits]
    return [o for o in found if (o.needs or 0) < (row.needs or 0)] if row.fits else found


def _first(rows: Sequence[Row], row: Row) -> Nearest | None:
    if not rows:
        return None
    best = rows[0]
    words = _changes(best, row)
    where = f"on {ranks(best.choice.world_size)} " if best.choice.world_size != row.choice.world_size else ""
    change = f"with {' '.join(words)} " if words else ""
    return Nearest(
        says=f"{where}{change}(needs {size(best.needs or 0)})",
        overrides=best.overrides,
        world_size=best.choice.world_size,
        row=best,
    )


def _more_ranks(plan: Plan, row: Row) -> Nearest | None:
    more = _less((other for other in plan.rows if other.choice.world_size > row.choice.world_size), row)
    # The same backend on more ranks is a smaller change than another.
    return _first(sorted(more, key=lambda other: other.choice.backend != row.choice.backend), row)


def _other_device(row: Row, here: Sequence[Row], devices: Sequence[Device]) -> Nearest | None:
    # Where activations are not known, it takes more than `needs`.
    known = [other for other in (row, *here) if other.needs is not None and not other.unknown]
    if not known:
        return None
    least = min(known, key=lambda other: other.needs or 0)
    needs = least.needs or 0
    if row.fits:
        return None
    roomy = sorted((device for device in devices if device.memory >= needs), key=lambda device: device.memory)
    named = f", as {roomy[0].name}" if roomy else ""
    words = _changes(least, row)
    change = f" with {' '.join(words)}" if words else ""
    return Nearest(
        says=f"on devices of {size(needs)} or more{named}{change}",
        overrides=least.overrides,
        world_size=row.choice.world_size,
        memory=needs,
    )


__all__ = ["Nearest", "nearest"]
