"""The numbers of a comparison as tables, for the terminal, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardkit.compare.bootstrap import Interval
from shardkit.compare.costs import Costs
from shardkit.compare.equivalence import CURVES
from shardkit.compare.results import Comparison
from shardkit.compare.settings import ABSENT, EXPLAINED, facts
from shardkit.compare.verdict import Verdict
from shardkit.pages.table import Table

MIB = 2**20


def verdict_table(found: Mapping[str, Verdict]) -> Table:
    """One line an arm: what matters most."""
    return Table(
        caption="What matters most, arm by arm",
        head=("arm", "verdict", "differs at", "speed (95 %)", "MiB/rank", "MiB/step", "1st step"),
        rows=[
            (
                name_of(verdict),
                verdict.outcome,
                _differs_at(verdict),
                _speed(verdict),
                _mib(verdict.costs.memory.deciding),
                _mib(_moved(verdict.costs)),
                _seconds(verdict.costs.first_step_seconds),
            )
            for verdict in found.values()
        ],
    )


def equivalence_table(found: Mapping[str, Verdict]) -> Table:
    """How far each arm is from the reference."""
    rows = []
    for verdict in found.values():
        for curve in verdict.equivalence.curves:
            if curve.name in CURVES:
                largest = max(range(len(curve.steps)), key=lambda i: curve.difference[i])
                rows.append(
                    (
                        name_of(verdict),
                        curve.name,
                        str(len(curve.steps)),
                        f"{curve.difference[0]:.1e}",
                        f"{curve.difference[largest]:.1e} at {curve.steps[largest]}",
                        str(curve.first) if curve.first is not None else ABSENT,
                        f"{curve.worst:.3g}",
                    )
                )
    head = ("arm", "curve", "steps", "at the first", "largest", "first above the bound", "of the bound, at most")
    return Table(caption="Relative differences to the reference", head=head, rows=rows)


def speed_table(found: Mapping[str, Verdict]) -> Table:
    """Items per second and ratios, with their intervals."""
    return Table(
        caption="Items per second, without the warm-up",
        head=("arm", "items/s", "95 % interval", "of the reference", "95 % interval", "repeats", "steps"),
        rows=[
            (
                name_of(verdict),
                f"{speed.items_per_second.value:,.1f}",
                f"{speed.items_per_second.low:,.1f} to {speed.items_per_second.high:,.1f}",
                _ratio(verdict),
                _range(speed.ratio),
                str(speed.repeats),
                str(speed.steps),
            )
            for verdict in found.values()
            if (speed := verdict.speed) is not None
        ],
    )


def memory_table(found: Mapping[str, Verdict]) -> Table:
    """Peaks of the rank that used most."""
    rows = []
    for verdict in found.values():
        memory = verdict.costs.memory
        rows.append((name_of(verdict), _mib(memory.allocated), _mib(memory.reserved), _mib(memory.host)))
    head = ("arm", "device, allocated", "device, reserved", "host, resident")
    return Table(caption="Peak memory in MiB, of the rank that used most", head=head, rows=rows)


def communication_table(found: Mapping[str, Verdict]) -> Table:
    """Measured beside theory, by collective."""
    return Table(
        caption="Communication of one optimizer step, of the rank that moved most",
        head=("arm", "collective", "calls", "calls, theory", "MiB", "MiB, theory", "MiB, least"),
        rows=[
            (
                name_of(verdict),
                each.kind,
                _count(each.calls),
                _count(each.theory_calls),
                _mib(each.bytes, digits=3),
                _mib(each.theory_bytes, digits=3),
                _mib(each.least_bytes, digits=3),
            )
            for verdict in found.values()
            for each in verdict.costs.communication
        ],
    )


def times_table(found: Mapping[str, Verdict]) -> Table:
    """What happens once or now and then."""
    return Table(
        caption="The first step, and checkpoints",
        head=("arm", "first step", "checkpoint MiB", "save", "load"),
        rows=[
            (
                name_of(verdict),
                _seconds(verdict.costs.first_step_seconds),
                _mib(verdict.costs.checkpoint_bytes),
                _seconds(verdict.costs.save_seconds),
                _seconds(verdict.costs.load_seconds),
            )
            for verdict in found.values()
        ],
    )


def settings_table(comparison: Comparison, *, explained: bool) -> Table:
    """The settings that are not the same in all arms, side by side: of the recipes, or of what they come to."""
    known = [facts(arm) for arm in comparison.arms]
    keys = dict.fromkeys(key for each in known for key in each if key.startswith(EXPLAINED) == explained)
    rows = [
        (key.removeprefix(EXPLAINED), *values)
        for key in keys
        if len(set(values := [each.get(key, ABSENT) for each in known])) > 1
    ]
    what = "What the settings come to" if explained else "Settings of the recipe"
    head = ("setting", *(arm.name for arm in comparison.arms))
    return Table(caption=f"{what} that are not the same in all arms", head=head, rows=rows)


def environment_table(comparison: Comparison) -> Table:
    """What the arms ran on, side by side where it is not the same."""
    known = []
    for arm in comparison.arms:
        environment = dict(next((run.environment for run in arm.runs if run.environment), {}))
        packages = environment.pop("packages", None)
        versions = packages if isinstance(packages, dict) else {}
        known.append(
            {k: v for k, v in {**environment, **versions}.items() if k not in ("command", "working_directory")}
        )
    rows = []
    for key in dict.fromkeys(key for each in known for key in each):
        values = [_plain(each.get(key)) for each in known]
        # The same everywhere is said once.
        rows.append(
            (
                key,
                values[0]
                if len(set(values)) == 1
                else "; ".join(f"{arm.name}: {value}" for arm, value in zip(comparison.arms, values, strict=True)),
            )
        )
    return Table(caption="What the arms ran on", head=("fact", "value"), rows=rows)


def errors_table(found: Mapping[str, Verdict]) -> Table:
    """Runs that did not complete."""
    rows = [(name_of(verdict), error) for verdict in found.values() for error in verdict.errors]
    return Table(caption="Runs that did not complete", head=("arm", "what became of it"), rows=rows)


def name_of(verdict: Verdict) -> str:
    """The name of an arm in a table, the reference marked."""
    return f"{verdict.arm} (reference)" if verdict.is_reference else verdict.arm


def without_empty_columns(table: Table, keep: Sequence[int] = (0,)) -> Table:
    """The table without the columns in which no row says anything."""
    columns = [i for i in range(len(table.head)) if i in keep or any(row[i] not in ("", ABSENT) for row in table.rows)]
    pick: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda row: tuple(row[i] for i in columns)  # noqa: E731
    return Table(caption=table.caption, head=pick(table.head), rows=[pick(row) for row in table.rows])


def _differs_at(verdict: Verdict) -> str:
    step = verdict.equivalence.step
    return f"step {step}" if step is not None else ABSENT


def _ratio(verdict: Verdict) -> str:
    ratio = verdict.speed.ratio if verdict.speed else None
    if ratio is None:
        return "1" if verdict.is_reference and verdict.speed else ABSENT
    return f"{'~' if ratio.holds(1.0) else ''}{ratio.value:.3f}"


def _speed(verdict: Verdict) -> str:
    ratio = verdict.speed.ratio if verdict.speed else None
    if ratio is None:
        return _ratio(verdict)
    return f"{'~' if ratio.holds(1.0) else ''}{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _range(interval: Interval | None) -> str:
    return ABSENT if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _moved(costs: Costs) -> float | None:
    found = [each.bytes for each in costs.communication if each.bytes is not None]
    return sum(found) if found else None


def _mib(count: float | None, *, digits: int = 1) -> str:
    return ABSENT if count is None else f"{count / MIB:,.{digits}f}"


def _count(calls: float | None) -> str:
    return ABSENT if calls is None else f"{calls:,.4g}"


def _seconds(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{seconds:.2f} s"


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or ABSENT
    return ABSENT if value is None else str(value)
