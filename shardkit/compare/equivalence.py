"""Whether the curves of two runs are equal but for rounding, from which step on they are not, and by how much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardkit.compare.cause import changes_maths, orders_alike
from shardkit.compare.results import Arm, Comparison, Run
from shardkit.compare.tolerance import Tolerance, finest

EVALUATION = "eval_loss"
CURVES = {"loss": "loss", "grad_norm": "gradient norm", EVALUATION: "evaluation loss"}
# Equal but for how a number was stored: the same in every run, whatever the rounding.
EXACT = {"lr": "learning rate", "items": "items of the step", "skipped": "skipped steps"}
EXACT_TOLERANCE = 1e-6
# Fewer prove nothing: many faults act on the first update, and show in the loss after it.
FEWEST_STEPS = 3
# A loss near zero has lost its digits to cancellation: differences are relative to at least this part of the first one.
SMALLEST = 0.01


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One number of two runs over the steps, and how far apart it is."""

    name: str
    steps: list[int]
    reference: list[float]
    arm: list[float]
    difference: list[float]
    # Relative; inf where one is not finite and the other is.
    allowed: list[float]
    # The relative difference that rounding explains; inf where it explains any.
    first: int | None
    # The first step with more.

    @property
    def largest(self) -> float:
        """The largest relative difference there is."""
        return max(self.difference, default=0.0)

    @property
    def worst(self) -> float:
        """How many times the allowed difference it is, at the worst step."""
        return max((d / a for d, a in zip(self.difference, self.allowed, strict=True) if d > 0), default=0.0)

    @property
    def telling(self) -> int:
        """The last step at which a difference would be evidence; 0 = none."""
        return max((s for s, a in zip(self.steps, self.allowed, strict=True) if math.isfinite(a)), default=0)

    def at(self, step: int) -> tuple[float, float]:
        """(difference, allowed) at a step."""
        index = self.steps.index(step)
        return self.difference[index], self.allowed[index]


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """What the curves of an arm say."""

    verdict: str
    # equivalent, different or inconclusive.
    sentence: str
    step: int | None = None
    # The first that differs.
    curve: str | None = None
    difference: float | None = None
    # Relative, there.
    allowed: float | None = None
    bit_equal: bool = False
    steps: int = 0
    # That were compared.
    telling: int = 0
    # The last step at which a difference of the loss would be evidence.
    dtype: str = "fp32"
    noise: str = "not measured"
    curves: tuple[Curve, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON: a number that is not finite is null."""
        return plain(asdict(self))


def equivalence(comparison: Comparison, arm: Arm) -> Equivalence:
    """Compare each completed run of an arm with the reference's run of the same repeat; the worst counts."""
    reference = comparison.reference_arm
    refused = _unusable(reference) or _unusable(arm)
    if refused:
        return Equivalence(verdict="inconclusive", sentence=refused)
    narrow = arm is not reference and changes_maths(reference, arm) and orders_alike(reference, arm)
    precisions = [_precision(reference), _precision(arm)]
    tolerance = comparison.tolerance or finest(precisions, narrow=narrow)
    floor = noise_floor(comparison)
    pairs = zip(itertools.cycle(reference.completed), arm.completed, strict=False)
    if arm is reference:
        return _itself(comparison, tolerance, floor)
    found = [compare_runs(run, other, tolerance=tolerance, floor=floor, limit=comparison.steps) for run, other in pairs]
    more = _unsaid(reference, arm)
    found = [_with(e, sentence=e.sentence + more) if e.verdict == "equivalent" else e for e in found]
    worst = max(found, key=_badness)
    unlike = [each for each in found if each.verdict != worst.verdict]
    if worst.verdict == "different" and unlike:
        doubt = f" {len(unlike)} of {len(found)} repeats do not show it: this arm is not deterministic."
        return _with(worst, sentence=worst.sentence + doubt)
    return _with(worst, bit_equal=all(each.bit_equal for each in found))


def compare_runs(
    reference: Run,
    run: Run,
    *,
    tolerance: Tolerance,
    floor: Mapping[str, Mapping[int, float]] | None = None,
    limit: int | None = None,
) -> Equivalence:
    """Compare two runs; `floor`: measured noise by curve and step, `limit`: the last step that counts."""
    curves = [*_rounded(reference, run, tolerance, floor or {}, limit), *_exact(reference, run, limit)]
    compared = next((curve.steps for curve in curves if curve.name == "loss"), [])
    noise = (
        "measured"
        if any(any(v > 0 for v in each.values()) for each in (floor or {}).values())
        else ("bit-equal" if floor else "not measured")
    )
    telling = max((curve.telling for curve in curves if curve.name == "loss"), default=0)
    facts: dict[str, Any] = {
        "steps": len(compared),
        "telling": telling,
        "dtype": tolerance.dtype,
        "noise": noise,
        "curves": tuple(curves),
    }
    # An evaluation comes after the step that it is of.
    diverged = [(c.first, c.name == EVALUATION, index) for index, c in enumerate(curves) if c.first is not None]
    if diverged:
        step, _, index = min(diverged)
        return _different(curves[index], step, facts)
    if len(compared) < FEWEST_STEPS:
        few = f"inconclusive: {len(compared)} steps in common are too few; at least {FEWEST_STEPS} are needed"
        return Equivalence(verdict="inconclusive", sentence=few + ".", **facts)
    if telling < compared[FEWEST_STEPS - 1]:
        noisy = "inconclusive: too noisy; the reference is as far from itself as any fault would be from it"
        return Equivalence(verdict="inconclusive", sentence=noisy + ".", **facts)
    found = _equivalent(curves, compared, facts)
    silent = _not_evaluated(reference, run, curves)
    return _with(found, sentence=f"{found.sentence} {silent}") if silent else found


def noise_floor(comparison: Comparison) -> dict[str, dict[int, float]] | None:
    """How far the reference arm is from itself, by curve and step: the running maximum over all pairs of its runs.

    None where it ran only once. All zero where it is equal to itself to the last bit.
    """
    runs = comparison.reference_arm.completed + [run for run in comparison.noise or [] if run.status == "completed"]
    if len(runs) < 2:
        return None
    floor: dict[str, dict[int, float]] = {}
    for name in CURVES:
        worst: dict[int, float] = {}
        for one, other in itertools.combinations(runs, 2):
            steps, a, b = _common(one, other, name, comparison.steps)
            for step, difference in zip(steps, _relative(a, b), strict=True):
                worst[step] = max(worst.get(step, 0.0), difference if math.isfinite(difference) else 0.0)
        floor[name] = _running_maximum(worst)
    return floor


def _itself(comparison: Comparison, tolerance: Tolerance, floor: dict[str, dict[int, float]] | None) -> Equivalence:
    """The reference beside its own repeat, or beside itself where there is none."""
    runs = comparison.reference_arm.completed + [run for run in comparison.noise or [] if run.status == "completed"]
    found = compare_runs(runs[0], runs[-1], tolerance=tolerance, floor=floor, limit=comparison.steps)
    if len(runs) == 1:
        return _with(found, sentence="the reference.", bit_equal=True)
    if found.bit_equal:
        return _with(found, sentence="the reference; run again it is equal to itself to the last bit.")
    loss = max((curve.largest for curve in found.curves if curve.name == "loss"), default=0.0)
    return _with(found, sentence=f"the reference; run again its loss is up to {loss:.1e} from itself.")


def _rounded(
    reference: Run, run: Run, tolerance: Tolerance, floor: Mapping[str, Mapping[int, float]], limit: int | None
) -> Iterator[Curve]:
    """The curves that rounding moves."""
    for name in CURVES:
        steps, a, b = _common(reference, run, name, limit)
        allowed = [
            value if value <= tolerance.most else math.inf for value in tolerance.allowed(name, steps, floor.get(name))
        ]
        if steps:
            yield _curve(name, steps, a, b, allowed)


def _exact(reference: Run, run: Run, limit: int | None) -> Iterator[Curve]:
    """The curves that are the same in every equal run."""
    for name in EXACT:
        steps, a, b = _common(reference, run, name, limit)
        if steps:
            yield _curve(name, steps, a, b, [EXACT_TOLERANCE] * len(steps))


def _curve(name: str, steps: list[int], a: list[float], b: list[float], allowed: list[float]) -> Curve:
    difference = _relative(a, b)
    # Beyond the last telling step any finite difference is as good as another, but a NaN is not.
    first = next((s for s, d, most in zip(steps, difference, allowed, strict=True) if d > most or d == math.inf), None)
    return Curve(name=name, steps=steps, reference=a, arm=b, difference=difference, allowed=allowed, first=first)


def _common(one: Run, other: Run, name: str, limit: int | None) -> tuple[list[int], list[float], list[float]]:
    """A number of two runs at the steps both wrote; NaN where it was not finite."""
    a, b = (dict(_values(run, name)) for run in (one, other))
    steps = [step for step in a if step in b and (limit is None or step <= limit)]
    return steps, [_number(a[step]) for step in steps], [_number(b[step]) for step in steps]


def _values(run: Run, name: str) -> Iterator[tuple[int, Any]]:
    lines, key = (run.evals, "loss") if name == EVALUATION else (run.train, name)
    return ((line["step"], line[key]) for line in lines if key in line)


def _number(value: Any) -> float:
    # metrics.jsonl has null for what was not finite.
    return math.nan if value is None else float(value)


def _relative(reference: Sequence[float], other: Sequence[float]) -> list[float]:
    first = next((abs(value) for value in reference if math.isfinite(value) and value != 0), 1.0)
    return [_apart(a, b, first * SMALLEST) for a, b in zip(reference, other, strict=True)]


def _apart(a: float, b: float, least: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        # NaN in both is the same outcome.
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(a - b) / max(abs(a), least)


def _running_maximum(values: Mapping[int, float]) -> dict[int, float]:
    steps = sorted(values)
    return dict(zip(steps, itertools.accumulate((values[step] for step in steps), max), strict=True))


def _different(curve: Curve, step: int, facts: dict[str, Any]) -> Equivalence:
    difference, allowed = curve.at(step)
    index = curve.steps.index(step)
    what = {**CURVES, **EXACT}[curve.name]
    # As many digits as show that it is more.
    digits = 1 if f"{difference:.1e}" != f"{allowed:.1e}" else 4
    apart = "is not finite in one of the two" if difference == math.inf else f"differs by {difference:.{digits}e}"
    sentence = (
        f"different from step {step} on: the {what} {apart} ({curve.reference[index]:.6g} in the reference, "
        f"{curve.arm[index]:.6g} here), and rounding explains {allowed:.{digits}e} there."
    )
    return Equivalence(
        verdict="different",
        sentence=sentence,
        step=step,
        curve=curve.name,
        difference=difference,
        allowed=allowed,
        **facts,
    )


def _equivalent(curves: Sequence[Curve], compared: Sequence[int], facts: dict[str, Any]) -> Equivalence:
    loss = next(curve for curve in curves if curve.name == "loss")
    if all(curve.reference == curve.arm for curve in curves):
        sentence = f"equivalent, and equal to the last bit in all {len(compared)} steps."
        return Equivalence(verdict="equivalent", sentence=sentence, bit_equal=True, **facts)
    telling = facts["telling"]
    within = _largest(loss, telling)
    near = f"losses within {within:.1e} of the reference" if within else "losses equal to the last bit"
    evaluated = next((curve for curve in curves if curve.name == EVALUATION and curve.telling), None)
    if evaluated:
        apart = _largest(evaluated, evaluated.telling)
        near += f" (of evaluations {f'within {apart:.1e}' if apart else 'too'})"
    sentence = f"equivalent: {near} over {telling} steps"
    if telling < compared[-1]:
        # Of a model that does not amplify, the steps after that say something all the same.
        sentence += (
            f", {_largest(loss, compared[-1]):.1e} over all {compared[-1]} (after step {telling} rounding alone may do "
            "more to a sensitive model, so those are no evidence)"
        )
    return Equivalence(verdict="equivalent", sentence=sentence + ".", **facts)


def _not_evaluated(reference: Run, run: Run, curves: Sequence[Curve]) -> str:
    """That evaluations, which there are, say nothing of the two, and why; empty where they do."""
    curve = next((curve for curve in curves if curve.name == EVALUATION), None)
    if curve is None:
        if not (reference.evals or run.evals):
            return ""
        why = "no step in common" if reference.evals and run.evals else "only one of the two made any"
    elif not curve.telling and curve.reference != curve.arm:
        why = f"at the first, step {curve.steps[0]}, rounding alone may do more to a sensitive model"
    else:
        return ""
    return f"Evaluations were not compared: {why}."


def _unsaid(reference: Arm, arm: Arm) -> str:
    """What the curves of equivalent runs cannot say: steps that only one made, and that nothing was evaluated."""
    said = ""
    last, own = (max((line["step"] for line in each.completed[0].train), default=0) for each in (reference, arm))
    if last != own:
        said += f" It made {own} steps, and the reference {last}."
    evaluated = any(run.evals for run in (*reference.completed, *arm.completed))
    if not evaluated and (arm.recipe.get("data") or {}).get("eval") is not None:
        said += " Evaluations were not compared: none was made."
    return said


def _largest(curve: Curve, last: int) -> float:
    return max(d for step, d in zip(curve.steps, curve.difference, strict=True) if step <= last)


def _unusable(arm: Arm) -> str | None:
    if arm.completed:
        return None
    if not arm.runs:
        return f"inconclusive: arm {arm.name} has no runs."
    run = next((run for run in arm.runs if run.error), arm.runs[0])
    error = f": {run.error.strip().splitlines()[-1]}" if run.error and run.error.strip() else ""
    return f"inconclusive: no run of arm {arm.name} completed ({run.status}{error})."


def _precision(arm: Arm) -> str:
    train = arm.recipe.get("train")
    return str(train.get("precision", "fp32")) if isinstance(train, dict) else "fp32"


def _badness(found: Equivalence) -> tuple[int, float, float]:
    """Different before inconclusive before equivalent; then the earlier step, then the larger difference."""
    order = {"equivalent": 0, "inconclusive": 1, "different": 2}[found.verdict]
    return order, -(found.step or math.inf), max((curve.worst for curve in found.curves), default=0.0)


def _with(found: Equivalence, **changes: Any) -> Equivalence:
    return replace(found, **changes)


def plain(value: Any) -> Any:
    """As JSON has it: lists for tuples, null for a number that is not finite."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
