"""What an arm costs beside time: memory, communication, the first step, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from shardkit.compare.results import Arm, Run


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of the rank that used most; None = not measured."""

    allocated: int | None = None
    reserved: int | None = None
    host: int | None = None

    @property
    def deciding(self) -> int | None:
        """What runs out first: the device's, else the host's."""
        return self.allocated or self.host


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of collective in one optimizer step, on the rank that moved most; theory None = not known."""

    kind: str
    calls: float | None
    bytes: float | None
    theory_calls: float | None
    theory_bytes: float | None
    least_bytes: float | None
    # What such a partition needs at least, by theory.


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Medians over the completed runs of an arm; None = not measured."""

    memory: Memory
    communication: tuple[Traffic, ...] = ()
    # Empty = neither measured nor known.
    first_step_seconds: float | None = None
    checkpoint_bytes: float | None = None
    save_seconds: float | None = None
    load_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def costs(arm: Arm) -> Costs:
    """What the runs of an arm have measured."""
    runs = arm.completed
    profiles = [run.profile for run in runs if run.profile]
    return Costs(
        memory=_memory(runs),
        communication=_communication(arm, profiles),
        first_step_seconds=_median(_first_step(run) for run in runs),
        checkpoint_bytes=_median(profile.get("checkpoint_bytes") for profile in profiles),
        save_seconds=_median(_save(run) for run in runs),
        load_seconds=_median(profile.get("load_seconds") for profile in profiles),
    )


def _memory(runs: Sequence[Run]) -> Memory:
    peaks = [_peaks(run) for run in runs]

    def whole(key: str) -> int | None:
        found = _median(peak[key] for peak in peaks)
        return None if found is None else round(found)

    return Memory(allocated=whole("allocated"), reserved=whole("reserved"), host=whole("host"))


def _peaks(run: Run) -> dict[str, float | None]:
    """The largest of each kind over the ranks of one run."""
    ranks = _ranks(run.profile)
    if not ranks:
        # Without a profile there is what rank 0 wrote about itself: its device's memory, or on a CPU its own.
        peak = max((line["memory_bytes"] for line in run.train if line.get("memory_bytes")), default=None)
        on_device = run.environment.get("device_type", "cpu") != "cpu"
        return {"allocated": peak if on_device else None, "reserved": None, "host": None if on_device else peak}
    return {
        key: max((rank[f"{key}_bytes"] for rank in ranks if rank.get(f"{key}_bytes")), default=None)
        for key in ("allocated", "reserved", "host")
    }


def _communication(arm: Arm, profiles: Sequence[Mapping[str, Any]]) -> tuple[Traffic, ...]:
    measured = [_of_worst_rank(profile) for profile in profiles]
    theory = per_collective((arm.explanation or {}).get("communication"))
    least = per_collective((arm.explanation or {}).get("communication_least"))
    kinds = sorted({kind for each in (*measured, theory, least) for kind in each})
    return tuple(
        Traffic(
            kind=kind,
            calls=_median(each.get(kind, {}).get("calls") for each in measured),
            bytes=_median(each.get(kind, {}).get("bytes") for each in measured),
            theory_calls=theory.get(kind, {}).get("calls"),
            theory_bytes=theory.get(kind, {}).get("bytes"),
            least_bytes=least.get(kind, {}).get("bytes"),
        )
        for kind in kinds
    )


def _of_worst_rank(profile: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Calls and bytes of an optimizer step by kind, of the rank with most bytes in all."""
    ranks = [per_collective(rank.get("communication")) for rank in _ranks(profile)]
    return max(ranks, key=lambda rank: sum(each.get("bytes", 0) for each in rank.values()), default={})


def per_collective(found: Any) -> dict[str, dict[str, float]]:
    """{kind: {"calls", "bytes"}} from that form or a list of mappings that name their kind, without nulls."""
    if isinstance(found, list):
        found = {each.get("kind") or each.get("collective"): each for each in found if isinstance(each, dict)}
    if not isinstance(found, dict):
        return {}
    return {
        str(kind): {key: float(each[key]) for key in ("calls", "bytes") if each.get(key) is not None}
        for kind, each in found.items()
        if isinstance(each, dict)
    }


def _ranks(profile: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    ranks = (profile or {}).get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def _first_step(run: Run) -> float | None:
    if run.profile and run.profile.get("first_step_seconds") is not None:
        return run.profile["first_step_seconds"]
    return run.train[0].get("seconds") if run.train else None


def _save(run: Run) -> float | None:
    if run.profile and run.profile.get("save_seconds") is not None:
        return run.profile["save_seconds"]
    return _median(line.get("seconds") for line in run.checkpoints)


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(median(found)) if found else None
