"""The statistics delta of each layer: one accumulation cycle against one large batch, with a verdict.

Of every channel, in units of the large batch's standard deviation (with eps, as the layer divides by): how far apart
the running means are, and by how much the ratio of the running variances differs from one. Twice: as the statistics
become from where the model has them, so that K updates count as K, and as they settle, which leaves out how fast they
move. A layer has the root mean square over its channels, and the verdict is that of the worse of the two.

`output_delta` is how far what the layer puts out in training is from what the large batch's statistics would make of
the same input, as a root mean square in standard deviations. Some of it is the noise of every BatchNorm, so it has no
verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from shardkit.doctor.passes import Observed, Statistics
from shardkit.normalization import Moments

MEAN_OK, MEAN_BADLY = 0.05, 0.25
# Standard deviations. A shift of 0.05 moves 2 % of the values of a normal channel across zero, where a ReLU cuts;
# 0.25 moves 10 %.
VARIANCE_OK, VARIANCE_BADLY = 0.10, 0.50
# Of the variance: 5 % and 22 % of the scale.

Verdict = Literal["ok", "drifts", "badly"]


@dataclass(frozen=True, kw_only=True)
class LayerDelta:
    """What accumulation does to one layer; deltas are None where it keeps no running statistics."""

    name: str
    mode: str
    # Whose statistics it uses under the policy: local (its micro-batch's) or a mode of shardkit's BatchNorm.
    channels: int
    momentum: float | None
    values: int
    # A channel in one forward, of all that share it.
    updates: int
    # Of the running statistics in one cycle.
    mean_delta: float | None
    variance_delta: float | None
    settled_mean_delta: float | None
    settled_variance_delta: float | None
    worst_mean_delta: float | None
    # Of the channel that differs most, as the statistics become or settle.
    worst_variance_delta: float | None
    output_delta: float

    @property
    def severity(self) -> float:
        """The largest delta as a multiple of what is still ok."""
        means = [value for value in (self.mean_delta, self.settled_mean_delta) if value is not None]
        variances = [value for value in (self.variance_delta, self.settled_variance_delta) if value is not None]
        return max([value / MEAN_OK for value in means] + [value / VARIANCE_OK for value in variances], default=0.0)

    @property
    def amount(self) -> str:
        """The deltas in words."""
        mean = max(self.mean_delta or 0.0, self.settled_mean_delta or 0.0)
        variance = max(self.variance_delta or 0.0, self.settled_variance_delta or 0.0)
        return f"{mean:.2g} standard deviations in the mean and {variance:.2g} of the variance"

    @property
    def verdict(self) -> Verdict:
        means = max(self.mean_delta or 0.0, self.settled_mean_delta or 0.0)
        variances = max(self.variance_delta or 0.0, self.settled_variance_delta or 0.0)
        # A delta that is no number is worse than any.
        if not (means <= MEAN_BADLY and variances <= VARIANCE_BADLY):
            return "badly"
        return "ok" if means <= MEAN_OK and variances <= VARIANCE_OK else "drifts"


def compare(cycle: dict[str, Observed], large: dict[str, Observed]) -> list[LayerDelta]:
    """The layers that both have, worst first."""
    found = [_compare(name, seen, large[name]) for name, seen in cycle.items() if name in large]
    return sorted(found, key=lambda delta: (-_order(delta.severity), -_order(delta.output_delta)))


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _compare(name: str, cycle: Observed, large: Observed) -> LayerDelta:
    layer = cycle.layer
    whole = Moments.merge(torch.stack([moments.packed() for moments in large.calls]))
    become = _delta(cycle.become, large.become, whole, layer.eps)
    settled = _delta(cycle.settled, large.settled, whole, layer.eps)
    return LayerDelta(
        name=name or "(the model)",
        mode=cycle.mode,
        channels=layer.num_features,
        momentum=layer.momentum,
        values=int(min(float(moments.count) for moments in cycle.calls)),
        updates=cycle.updates,
        mean_delta=_rms(become[0]) if become else None,
        variance_delta=_rms(become[1]) if become else None,
        settled_mean_delta=_rms(settled[0]) if settled else None,
        settled_variance_delta=_rms(settled[1]) if settled else None,
        worst_mean_delta=_most(become[0], settled[0]) if become and settled else None,
        worst_variance_delta=_most(become[1], settled[1]) if become and settled else None,
        output_delta=_output_delta(cycle.calls, large.calls, layer.eps),
    )


def _delta(cycle: Statistics | None, large: Statistics | None, whole: Moments, eps: float) -> Statistics | None:
    """(mean, variance) deltas of the channels."""
    if cycle is None or large is None:
        return None
    mean = (cycle[0] - large[0]) / (whole.variance() + eps).sqrt()
    return mean, (cycle[1] + eps) / (large[1] + eps) - 1


def _output_delta(cycle: tuple[Moments, ...], large: tuple[Moments, ...], eps: float) -> float:
    """Of x normalised by its own (m_k, s_k), against (m, s): E[d^2] = v_k (1/s_k - 1/s)^2 + ((m_k - m) / s)^2."""
    # A layer that is called n times in a forward is compared call by call.
    total = count = 0.0
    for index, own in enumerate(cycle):
        whole = large[index % len(large)]
        spread, common = (own.variance() + eps).sqrt(), (whole.variance() + eps).sqrt()
        squares = own.variance() * (1 / spread - 1 / common).square() + ((own.mean - whole.mean) / common).square()
        total += float(squares.mean() * own.count)
        count += float(own.count)
    return math.sqrt(total / count) if count else 0.0


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _most(*values: torch.Tensor) -> float:
    return max(float(value.abs().max()) for value in values)
