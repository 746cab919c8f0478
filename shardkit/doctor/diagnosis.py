"""The diagnosis: both measurements, a verdict in plain words, and the normalization block to paste."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.doctor.delta import MEAN_BADLY, MEAN_OK, VARIANCE_BADLY, VARIANCE_OK, LayerDelta, compare
from shardkit.doctor.flatness import FLAT, Flatness, flatness
from shardkit.doctor.passes import Observed, cycle, large_batch, training_norms
from shardkit.doctor.subject import Subject, open_copy, untouched_streams
from shardkit.errors import WindowError
from shardkit.losses.adapting import num_rows
from shardkit.normalization import recommend
from shardkit.recipe.schema import Exact, Normalization, Policy
from shardkit.recipe.writing import written

THRESHOLDS = {"mean": [MEAN_OK, MEAN_BADLY], "variance": [VARIANCE_OK, VARIANCE_BADLY], "flat": FLAT}


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """What to write into the recipe."""

    policy: str
    block: str
    why: str
    remaining: float | None = None
    # The largest severity measured under it; None = not measured.


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found; `layers` come worst first."""

    policy: str
    # What the recipe asks for; with auto, what it chose.
    world_size: int
    accumulation: int
    micro_batch_size: int
    items: int
    layers: tuple[LayerDelta, ...]
    memory: tuple[Flatness, ...]
    verdict: str
    recommended: Recommended
    failure: str | None = None
    # Why the accumulation cycle could not be run.

    def to_json(self) -> dict[str, Any]:
        """What `json.dumps` takes; the keys are those of `shardkit.doctor`."""
        layers = [{**dataclasses.asdict(d), "severity": d.severity, "verdict": d.verdict} for d in self.layers]
        memory = [{**dataclasses.asdict(flat), "verdict": flat.verdict} for flat in self.memory]
        whole = {**dataclasses.asdict(self), "layers": layers, "memory": memory, "thresholds": THRESHOLDS}
        return {name: _strict(value) for name, value in whole.items()}


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def diagnose(subject: Subject) -> Diagnosis:
    """Examine copies of the model; the model, its buffers and the random streams stay as they are.

    Raises:
        NormalizationError: a layer would lose something under the recipe's policy.
        DataError: the micro-batches cannot be joined into a large batch.
    """
    with untouched_streams(subject.device):
        subject = _settled(subject)
        section = subject.normalization
        applied = open_copy(subject, section, subject.accumulation)
        policy, norms = applied.norms.applied.policy, training_norms(applied.model)
        failure, deltas = None, []
        large: dict[str, Observed] = {}
        if norms:
            large = large_batch(subject, open_copy(subject, section, subject.accumulation))
            try:
                deltas = compare(cycle(subject, applied), large)
            except (ValueError, WindowError) as error:
                failure = _one_value(error)
        recommended = _recommend(subject, policy, bool(norms), deltas, large)
        memory = [flatness(subject, section, name=policy)]
        if norms and policy != "exact":
            memory.append(flatness(subject, _with_policy(section, "exact"), name="exact"))
        return Diagnosis(
            policy=policy,
            world_size=subject.world_size,
            accumulation=subject.accumulation,
            micro_batch_size=subject.micro_batch_size,
            items=_items(subject),
            layers=tuple(deltas),
            memory=tuple(memory),
            verdict=_verdict(subject, policy, deltas, memory, failure, recommended.policy),
            recommended=recommended,
            failure=failure,
        )


def _settled(subject: Subject) -> Subject:
    """With the policy that auto chooses for the recipe's ranks, which its copies here do not have."""
    if subject.normalization.policy != "auto":
        return subject
    return dataclasses.replace(
        subject, normalization=_with_policy(subject.normalization, _recommended(subject, spatial_size=None)[0])
    )


def _recommended(subject: Subject, *, spatial_size: int | None) -> tuple[Policy, str]:
    return recommend(
        subject.model,
        world_size=subject.world_size,
        micro_batch_size=subject.micro_batch_size,
        accumulation=subject.accumulation,
        pretrained=subject.normalization.pretrained,
        spatial_size=spatial_size,
    )


def _one_value(error: Exception) -> str:
    """The message of a micro-batch that has no variance; any other error is the model's own."""
    if "value a channel" in str(error) or "value per channel" in str(error):
        return str(error)
    raise error


def _recommend(
    subject: Subject, policy: str, depends: bool, deltas: Sequence[LayerDelta], large: dict[str, Observed]
) -> Recommended:
    section = subject.normalization
    if not depends:
        return Recommended(
            policy=policy,
            block=_block(section),
            why="No layer of the model normalises by its batch in training under this policy. Nothing in it depends "
            "on how the batch is cut, so there is nothing to do.",
            remaining=0.0,
        )
    if policy == "exact":
        return Recommended(
            policy=policy,
            block=_block(section),
            why="Every BatchNorm already normalises by the whole logical batch. Neither accumulation nor ranks show in "
            "the result, so there is nothing to change.",
            remaining=_remaining(deltas),
        )
    values = [float(seen.calls[0].count) for seen in large.values()]
    best, why = _recommended(subject, spatial_size=max(int(min(values, default=1.0) / _items(subject)), 1))
    left = deltas if best == policy else _measured(subject, best, large)
    if best == "deferred" and any(delta.verdict == "badly" for delta in left):
        worst = left[0]
        best, left = "exact", _measured(subject, "exact", large)
        why = (
            f"Under deferred, which the size of a micro-batch would allow, the statistics of {worst.name} are still "
            f"off by {_amount(worst)}. Exact normalises by the whole logical batch, and leaves nothing of it."
        )
    return Recommended(
        policy=best, block=_block(_with_policy(section, best)), why=why, remaining=_remaining(left) if left else None
    )


def _measured(subject: Subject, policy: Policy, large: dict[str, Observed]) -> list[LayerDelta]:
    engine = open_copy(subject, _with_policy(subject.normalization, policy), subject.accumulation)
    try:
        return compare(cycle(subject, engine), large)
    except (ValueError, WindowError) as error:
        _one_value(error)
        return []


def _remaining(deltas: Sequence[LayerDelta]) -> float:
    return max((delta.severity for delta in deltas), default=0.0)


def _with_policy(section: Normalization, policy: Policy) -> Normalization:
    """The recipe's section with another policy; what has no meaning under it goes, rules stay."""
    policies = {policy, *(rule.policy for rule in section.rules)}
    return dataclasses.replace(
        section,
        policy=policy,
        over_ranks=section.over_ranks and "deferred" in policies,
        exact=section.exact if "exact" in policies else Exact(),
    )


def _block(section: Normalization) -> str:
    """What differs from the defaults, and always the policy."""
    default = dataclasses.asdict(Normalization())
    given = dataclasses.asdict(section)
    kept = {name: value for name, value in given.items() if name == "policy" or value != default[name]}
    return written({"normalization": kept}, {}, "").rstrip()


def _verdict(
    subject: Subject,
    policy: str,
    deltas: Sequence[LayerDelta],
    memory: Sequence[Flatness],
    failure: str | None,
    recommended: str,
) -> str:
    if failure:
        first = f"A forward of the recipe's micro-batches fails under {policy}: {failure}."
    elif not deltas:
        first = _without_norms(subject, policy)
    else:
        first = _drift(subject, policy, deltas, _cut(subject))
    shown = [flat for flat in memory if flat.policy in (policy, recommended)]
    return " ".join([first, *map(_flatness, shown)])


def _flatness(flat: Flatness) -> str:
    if flat.growth is None:
        return f"Memory could not be measured under {flat.policy} at every accumulation: {flat.failure}."
    word = "stays flat" if flat.verdict == "flat" else "grows"
    sentence = f"Memory {word} under {flat.policy}: {flat.growth:.2f} times from accumulation 2 to 8."
    if flat.policy == "exact" and flat.verdict == "grows":
        sentence += (
            " Where that does not fit: normalization.exact.offload=true, or normalization.exact.memory=constant."
        )
    return sentence


def _without_norms(subject: Subject, policy: str) -> str:
    if not training_norms(subject.model):
        return "No BatchNorm in this model normalises by its batch: accumulation and ranks change nothing."
    return f"Policy {policy} leaves no BatchNorm that normalises by its batch: accumulation and ranks change nothing."


def _drift(subject: Subject, policy: str, deltas: Sequence[LayerDelta], cut: str) -> str:
    off = [delta for delta in deltas if delta.verdict != "ok"]
    if not off:
        return (
            f"No layer drifts under {policy}: after {cut}, all {len(deltas)} have the running statistics of one batch "
            f"of {_items(subject)} items, to {_amount(deltas[0])}."
        )
    badly = sum(delta.verdict == "badly" for delta in off)
    names = ", ".join(delta.name for delta in off[:3])
    more = f" and {len(off) - 3} more" if len(off) > 3 else ""
    sentence = (
        f"{len(off)} of {len(deltas)} layers drift under {policy}, {badly} of them badly ({names}{more}): after {cut}, "
        f"their running statistics are not those of one batch of {_items(subject)} items, off by {_amount(off[0])} "
        f"in the worst layer."
    )
    worst = off[0]
    if worst.updates > 1 and worst.momentum is not None:
        pace = 1 - (1 - worst.momentum) ** worst.updates
        sentence += (
            f" They move {worst.updates} times an optimizer step: momentum {worst.momentum:g} works as {pace:.2g}."
        )
    return sentence


def _cut(subject: Subject) -> str:
    ranks = f" on each of {subject.world_size} ranks" if subject.world_size > 1 else ""
    count = subject.accumulation
    return f"{count} micro-batch{'es' if count > 1 else ''} of {subject.micro_batch_size}{ranks}"


def _amount(delta: LayerDelta) -> str:
    mean = max(delta.mean_delta or 0.0, delta.settled_mean_delta or 0.0)
    variance = max(delta.variance_delta or 0.0, delta.settled_variance_delta or 0.0)
    return f"{mean:.2g} standard deviations in the mean and {variance:.2g} of the variance"


def _items(subject: Subject) -> int:
    return sum(num_rows(batch) for batch in subject.micro_batches())
