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


@dataclass(frozen=True, kw_only=True)
class Launches:
    """How far launches of the same arm are from each other, from all arms together: two repeats alone say little."""

    residuals: np.ndarray
    # Of the log ratios, as far from the truth as one launch is.
    freedom: int
    # Degrees of freedom.


def rate_log(run: Timed) -> float:
    """The log of items per second."""
    return math.log(run.rate)


def ratio_log(reference: Timed, arm: Timed) -> float:
    """The log of arm / reference, in items per second."""
    return rate_log(arm) - rate_log(reference)


def launches(logs_by_arm: Sequence[Sequence[float]]) -> Launches | None:
    """Pooled from the log ratios, or rates, of each arm's repeats; None where no arm has two.

    The ratios of one repeat share its run of the reference, half of their variance, so that A arms are worth
    A / (1 + (A - 1) / 4) when their variance is estimated.
    """
    several = [np.array(logs) for logs in logs_by_arm if len(logs) > 1]
    if not several:
        return None
    residuals = [(logs - logs.mean()) * math.sqrt(len(logs) / (len(logs) - 1)) for logs in several]
    freedom = sum(len(logs) - 1 for logs in several) / (1 + (len(several) - 1) / 4)
    return Launches(residuals=np.concatenate(residuals), freedom=max(1, int(freedom)))


def ratio_interval(
    reference: Sequence[Timed], arm: Sequence[Timed], *, spread: Launches | None = None, seed: int = 0
) -> Interval:
    """The ratio arm / reference of items per second, over the paired repeats, and its interval.

    Percentiles of the log ratio over resampled repeats and, within each, resampled blocks of steps (Kuensch 1989:
    neighbouring steps share the load of the machine). A bootstrap over few repeats is too narrow, by sqrt((n - 1) / n)
    and by the normal in Student's place, so what the repeats contribute is widened by both (Hesterberg 2015, "What
    teachers should know about the bootstrap", 3.1). With one pair the interval covers steps only.

    Args:
        spread: what all arms of a comparison say of the repeats; None = these alone.
    """
    draws = np.random.default_rng(seed)
    logs = np.array([ratio_log(a, b) for a, b in zip(reference, arm, strict=True)])
    within = np.array([_deviations(b, draws) - _deviations(a, draws) for a, b in zip(reference, arm, strict=True)])
    return _interval(float(logs.mean()), _means(logs, within, spread or launches([logs.tolist()]), draws))


def rate_interval(runs: Sequence[Timed], *, spread: Launches | None = None, seed: int = 0) -> Interval:
    """Items per second of an arm over its repeats, with an interval made as that of `ratio_interval`."""
    draws = np.random.default_rng(seed)
    logs = np.array([rate_log(run) for run in runs])
    within = np.array([_deviations(run, draws) for run in runs])
    return _interval(float(logs.mean()), _means(logs, within, spread or launches([logs.tolist()]), draws))


def _means(logs: np.ndarray, within: np.ndarray, spread: Launches | None, draws: np.random.Generator) -> np.ndarray:
    """Resampled deviations of the mean over repeats, from their steps and from the launches."""
    count = len(logs)
    chosen = draws.integers(0, count, (RESAMPLES, count))
    steps = within[chosen, np.arange(RESAMPLES)[:, None]].mean(axis=1)
    if spread is None or count < 2:
        return steps
    drawn = draws.choice(spread.residuals, (RESAMPLES, count)).mean(axis=1)
    return steps + drawn * _student(spread.freedom) / 1.96


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
    return math.sqrt(count / (count - 1)) * _student(count - 1) / 1.96 if count > 1 else 1.0


def _student(freedom: int) -> float:
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96


def _interval(log: float, deviations: np.ndarray) -> Interval:
    low, high = np.quantile(deviations, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value=math.exp(log), low=math.exp(log + low), high=math.exp(log + high))
