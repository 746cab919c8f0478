"""How fast arms are beside the reference: items per second without the warm-up, as ratios of interleaved repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardkit.compare.bootstrap import (
    Interval,
    Launches,
    Timed,
    launches,
    rate_interval,
    rate_log,
    ratio_interval,
    ratio_log,
)
from shardkit.compare.results import Arm, Comparison, Run

# The first step builds buckets, allocates and looks for kernels on every backend; the second still grows caches.
LEAST_WARM_UP = 2
# Settled: the median of so many steps is at most so many times that of the second half of the run.
WINDOW = 5
SETTLED = 1.25
FEWEST_STEPS = 3
MOST_WARM_UP = 10


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of an arm."""

    items_per_second: Interval
    ratio: Interval | None
    # Of the arm over the reference; None for the reference itself.
    warm_up: int
    # Steps that were left out at the beginning of each run.
    steps: int
    # That were timed, in each run.
    repeats: int
    sentence: str

    @property
    def shows_difference(self) -> bool:
        return self.ratio is not None and not self.ratio.holds(1.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def speeds(comparison: Comparison) -> dict[str, Speed]:
    """The speed of each arm that has completed runs with enough steps, by name."""
    arms = [arm for arm in comparison.arms if arm.completed]
    # The same steps of every run, so that pairs stay pairs.
    warm_up = max((_warm_up(run) for arm in arms for run in arm.completed), default=LEAST_WARM_UP)
    timed = {arm.name: {i: _timed(run, warm_up, comparison.steps) for i, run in _by_repeat(arm)} for arm in arms}
    enough = {
        name: {i: run for i, run in runs.items() if len(run.seconds) >= FEWEST_STEPS} for name, runs in timed.items()
    }
    reference = enough.get(comparison.reference, {})
    others = [runs for name, runs in enough.items() if name != comparison.reference]
    spread = launches([[ratio_log(reference[i], runs[i]) for i in _paired(reference, runs)] for runs in others])
    rates = launches([[rate_log(run) for run in runs.values()] for runs in enough.values()])
    return {
        name: _speed(None if name == comparison.reference else reference, runs, (rates, spread), warm_up)
        for name, runs in enough.items()
        if runs
    }


def _speed(
    reference: dict[int, Timed] | None,
    runs: dict[int, Timed],
    spreads: tuple[Launches | None, Launches | None],
    warm_up: int,
) -> Speed:
    """Of an arm beside the reference, or of the reference itself (None); `spreads`: of rates, and of ratios."""
    both = _paired(reference or {}, runs)
    pairs = [(reference[i], runs[i]) for i in both] if reference else []
    ratio = ratio_interval([a for a, _ in pairs], [b for _, b in pairs], spread=spreads[1]) if pairs else None
    return Speed(
        items_per_second=rate_interval(list(runs.values()), spread=spreads[0]),
        ratio=ratio,
        warm_up=warm_up,
        steps=min(len(run.seconds) for run in runs.values()),
        repeats=len(both) or len(runs),
        sentence="the reference." if reference is None else _sentence(ratio, len(both), warm_up),
    )


def _paired(reference: dict[int, Timed], runs: dict[int, Timed]) -> list[int]:
    """The repeats that both have."""
    return sorted(reference.keys() & runs.keys())


def _sentence(ratio: Interval | None, pairs: int, warm_up: int) -> str:
    if ratio is None:
        return "no repeat to pair with the reference."
    interval = f"{ratio.value:.3f} times the reference's items/s (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
    what = "no difference shown: " if ratio.holds(1.0) else "faster: " if ratio.value > 1 else "slower: "
    over = f"{pairs} paired repeats" if pairs > 1 else "one pair of runs: the interval covers their steps only"
    return f"{what}{interval}, over {over}, without the first {warm_up} steps."


def _by_repeat(arm: Arm) -> list[tuple[int, Run]]:
    """The completed runs with the number of their repeat, by which runs of two arms are neighbours in time."""
    return [(index, run) for index, run in enumerate(arm.runs) if run.status == "completed"]


def _timed(run: Run, warm_up: int, limit: int | None) -> Timed:
    lines = [line for line in run.train[warm_up:] if line.get("seconds") and (limit is None or line["step"] <= limit)]
    return Timed(
        items=np.array([line.get("items", 0) for line in lines], dtype=float),
        seconds=np.array([line["seconds"] for line in lines], dtype=float),
    )


def _warm_up(run: Run) -> int:
    """The steps before the time of a step has settled, at most ten and a third of them."""
    seconds = [float(line["seconds"]) for line in run.train if line.get("seconds")]
    most = min(MOST_WARM_UP, len(seconds) // 3)
    settled = SETTLED * _median(seconds[len(seconds) // 2 :])
    for start in range(LEAST_WARM_UP, most):
        # What comes right after a warm-up step tells whether it was the last.
        if _median(seconds[start : start + WINDOW]) <= settled and seconds[start] <= 2 * settled:
            return start
    return min(LEAST_WARM_UP, most) if most <= LEAST_WARM_UP else most


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0
