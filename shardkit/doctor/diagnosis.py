"""The diagnosis: both measurements, a verdict in plain words, and the normalization block to paste."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from shardkit.doctor.advice import Recommended, advise, one_value, settled, with_policy
from shardkit.doctor.delta import MEAN_BADLY, MEAN_OK, VARIANCE_BADLY, VARIANCE_OK, LayerDelta, compare
from shardkit.doctor.flatness import FLAT, Flatness, flatness
from shardkit.doctor.passes import Observed, cycle, large_batch, training_norms
from shardkit.doctor.subject import Subject, open_copy, untouched_streams
from shardkit.doctor.verdict import in_words
from shardkit.errors import WindowError

THRESHOLDS = {"mean": [MEAN_OK, MEAN_BADLY], "variance": [VARIANCE_OK, VARIANCE_BADLY], "flat": FLAT}


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
        subject = settled(subject)
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
                failure = one_value(error)
        recommended = advise(subject, policy, bool(norms), deltas, large)
        memory = [flatness(subject, section, name=policy)]
        if norms and policy != "exact":
            memory.append(flatness(subject, with_policy(section, "exact"), name="exact"))
        return Diagnosis(
            policy=policy,
            world_size=subject.world_size,
            accumulation=subject.accumulation,
            micro_batch_size=subject.micro_batch_size,
            items=subject.items,
            layers=tuple(deltas),
            memory=tuple(memory),
            verdict=in_words(subject, policy, deltas, memory, failure, recommended.policy),
            recommended=recommended,
            failure=failure,
        )
