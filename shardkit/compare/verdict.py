"""The verdict on each arm, and which one to pick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.compare.cause import cause
from shardkit.compare.costs import Costs, costs
from shardkit.compare.equivalence import EVALUATION, Equivalence, equivalence
from shardkit.compare.results import Arm, Comparison
from shardkit.compare.settings import Setting, differences
from shardkit.compare.speed import Speed, speeds

# Less memory counts from this part on: allocators round.
MEMORY_COUNTS = 0.05


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of one arm beside the reference."""

    arm: str
    is_reference: bool
    equivalence: Equivalence
    speed: Speed | None
    # None = no completed run with enough steps.
    costs: Costs
    cause: str | None
    # Why it differs, probably; None = it does not.
    settings: tuple[Setting, ...]
    # Those it does not share with the reference.
    completed: int
    # Runs.
    errors: tuple[str, ...]
    # Of the runs that did not complete.

    @property
    def outcome(self) -> str:
        """equivalent, different or inconclusive, or failed: no run completed."""
        return self.equivalence.verdict if self.completed else "failed"

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "reference": self.is_reference,
            "verdict": self.outcome,
            "cause": self.cause,
            "equivalence": self.equivalence.to_json(),
            "speed": self.speed.to_json() if self.speed else None,
            "costs": self.costs.to_json(),
            "settings": [asdict(setting) for setting in self.settings],
            "errors": list(self.errors),
        }


def verdicts(comparison: Comparison) -> dict[str, Verdict]:
    """The verdict on each arm by its name, in the order of the arms.

    Raises:
        KeyError: no arm has the reference's name.
    """
    reference = comparison.reference_arm
    speed = speeds(comparison)
    return {arm.name: _verdict(comparison, reference, arm, speed.get(arm.name)) for arm in comparison.arms}


def are_equal(found: Mapping[str, Verdict]) -> bool:
    """Whether each arm is equivalent to the reference: what the exit code says."""
    return all(verdict.outcome == "equivalent" for verdict in found.values())


def recommendation(found: Mapping[str, Verdict]) -> str:
    """Which arm to pick, in two sentences: the fastest equal one; where speed does not decide, memory, then order."""
    equal = [verdict for verdict in found.values() if verdict.outcome == "equivalent" and verdict.speed is not None]
    if not equal:
        return "None of the arms can be recommended. None is known to be equivalent to the reference."
    fastest = max(equal, key=_rate)
    near = [verdict for verdict in equal if not _clearly_slower(verdict, fastest)]
    if len(near) == 1:
        if len(equal) < sum(verdict.outcome == "equivalent" for verdict in found.values()):
            return f"Pick {fastest.arm}. Of the equivalent arms it is the only one whose speed is known."
        if len(equal) == 1:
            only = "No other arm is known to be equivalent" if fastest.is_reference else "It is the only equivalent arm"
            return f"Pick {fastest.arm}. {only}."
        return f"Pick {fastest.arm}. It is the fastest of the {len(equal)} equivalent arms: {_of_rate(fastest)}."
    least = min((v.costs.memory.deciding for v in near if v.costs.memory.deciding), default=None)
    # Arms stand in the order of the request, the simplest first by custom.
    light = [v for v in near if least is None or (v.costs.memory.deciding or least) <= least * (1 + MEMORY_COUNTS)]
    picked = light[0]
    names = ", ".join(verdict.arm for verdict in near if verdict is not picked)
    if len(light) < len(near) and least is not None:
        return (
            f"Pick {picked.arm}. No difference in speed is shown to {names}, and it needs least memory: {_mib(least)}."
        )
    return f"Pick {picked.arm}. No difference in speed or memory is shown to {names}, and it comes first."


def _speaking(found: Equivalence) -> str | None:
    """The curve that differs first, where it says what kind of setting it is."""
    trained_apart = any(curve.first is not None for curve in found.curves if curve.name != EVALUATION)
    return None if found.curve == EVALUATION and trained_apart else found.curve


def _verdict(comparison: Comparison, reference: Arm, arm: Arm, speed: Speed | None) -> Verdict:
    found = equivalence(comparison, arm)
    is_reference = arm is reference
    return Verdict(
        arm=arm.name,
        is_reference=is_reference,
        equivalence=found,
        speed=speed,
        costs=costs(arm),
        completed=len(arm.completed),
        cause=cause(reference, arm, _speaking(found)) if found.verdict == "different" and not is_reference else None,
        settings=() if is_reference else tuple(differences(reference, arm)),
        errors=tuple(
            f"{run.status}: {run.error or 'no error was written'}" for run in arm.runs if run.status != "completed"
        ),
    )


def _clearly_slower(verdict: Verdict, fastest: Verdict) -> bool:
    """Whether the intervals say so: of the ratios to the reference, which pair the repeats, else of the rates."""
    if verdict is fastest or verdict.speed is None or fastest.speed is None:
        return False
    if verdict.is_reference and fastest.speed.ratio is not None:
        return fastest.speed.ratio.low > 1
    if fastest.is_reference and verdict.speed.ratio is not None:
        return verdict.speed.ratio.high < 1
    ours, theirs = (v.speed.ratio or v.speed.items_per_second for v in (verdict, fastest) if v.speed)
    return ours.high < theirs.low


def _rate(verdict: Verdict) -> float:
    if verdict.speed is None:
        return 0.0
    return verdict.speed.ratio.value if verdict.speed.ratio else 1.0


def _of_rate(verdict: Verdict) -> str:
    return f"{verdict.speed.items_per_second.value:,.0f} items/s" if verdict.speed else ""


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB a rank"
