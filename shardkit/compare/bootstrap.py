"""Bootstrap intervals (Efron, Annals of Statistics 7, 1979), for ratios of paired repeats of timed steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
# More steps than this are added up in bins, which is as good an estimate and much faster.
MOST_BINS = 120
LEVEL = 0.95
BLOCK = 2.0
# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; 1.96 for more.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The steps of one run: items and seconds of each."""

    items: np.ndarray
    seconds: np.ndarray

    @property
    def rate(self) -> float:
        """Items per second."""
        return float(self.items.sum() / self.seconds.sum())


def ratio_interval(reference: Sequence[Timed], arm: Sequence[Timed], *, seed: int = 0) -> Interval:
    """The ratio arm / reference of items per second, over the paired repeats, and its interval.

    Percentiles of the log ratio over resampled repeats and, within each, resampled blocks of steps (Kuensch 1989:
    neighbouring steps share the load of the machine). A bootstrap over few repeats is too narrow, by sqrt((n - 1) / n)
    and by the normal in Student's place, so what the repeats contribute is widened by both (Hesterberg 2015, "What
    teachers should know about the bootstrap", 3.1). With one pair the interval covers steps only.
    """
    draws = np.random.default_rng(seed)
    logs = np.array([math.log(b.rate / a.rate) for a, b in zip(reference, arm, strict=True)])
    within = np.array([_deviations(b, draws) - _deviations(a, draws) for a, b in zip(reference, arm, strict=True)])
    count = len(logs)
    chosen = draws.integers(0, count, (RESAMPLES, count))
    between = (logs[chosen].mean(axis=1) - logs.mean()) * _widening(count)
    steps = within[chosen, np.arange(RESAMPLES)[:, None]].mean(axis=1)
    return _interval(float(logs.mean()), between + steps)


def rate_interval(runs: Sequence[Timed], *, seed: int = 0) -> Interval:
    """Items per second of an arm over its repeats, with the interval of `ratio_interval`."""
    draws = np.random.default_rng(seed)
    logs = np.array([math.log(run.rate) for run in runs])
    within = np.array([_deviations(run, draws) for run in runs])
    chosen = draws.integers(0, len(logs), (RESAMPLES, len(logs)))
    between = (logs[chosen].mean(axis=1) - logs.mean()) * _widening(len(logs))
    return _interval(float(logs.mean()), between + within[chosen, np.arange(RESAMPLES)[:, None]].mean(axis=1))


def _deviations(run: Timed, draws: np.random.Generator) -> np.ndarray:
    """How far the log of items per second is from the run's own when steps are resampled in blocks.

    The length of a block grows as the cube root of the number of steps. Few blocks are widened as few repeats are.
    """
    run = run if len(run.seconds) <= MOST_BINS else _binned(run)
    count = len(run.seconds)
    length = max(1, min(count // 4, round(BLOCK * count ** (1 / 3))))
    starts = draws.integers(0, count, (RESAMPLES, math.ceil(count / length)))
    # Blocks that run over the end go on at the beginning, so that each step is as likely as another.
    steps = ((starts[:, :, None] + np.arange(length)) % count).reshape(RESAMPLES, -1)[:, :count]
    rates = np.log(run.items[steps].sum(axis=1) / run.seconds[steps].sum(axis=1))
    return (rates - math.log(run.rate)) * _widening(count // length)


def _binned(run: Timed) -> Timed:
    starts = np.linspace(0, len(run.seconds), MOST_BINS, endpoint=False).astype(int)
    return Timed(items=np.add.reduceat(run.items, starts), seconds=np.add.reduceat(run.seconds, starts))


def _widening(count: int) -> float:
    if count < 2:
        return 1.0
    student = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 1.96
    return math.sqrt(count / (count - 1)) * student / 1.96


def _interval(log: float, deviations: np.ndarray) -> Interval:
    low, high = np.quantile(deviations, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value=math.exp(log), low=math.exp(log + low), high=math.exp(log + high))
