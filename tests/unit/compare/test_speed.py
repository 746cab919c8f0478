"""Intervals cover the truth, repeats are paired, and the warm-up is left out."""

from __future__ import annotations

import numpy as np
import pytest

from shardkit.compare.bootstrap import RESAMPLES, Timed, launches, ratio_interval, ratio_log
from shardkit.compare.results import Comparison
from shardkit.compare.speed import speeds
from tests.comparisons import make_arm, make_run


def simulated(draws: np.random.Generator, repeats: int, ratio: float, *, own: float) -> tuple[list[Timed], list[Timed]]:
    """Interleaved repeats: a load that both of a pair share, noise of each launch, and steps that hang together."""
    reference, arm = [], []
    for _ in range(repeats):
        load = 0.2 * draws.standard_normal()
        for runs, seconds in ((reference, 0.1 * ratio), (arm, 0.1)):
            wave = np.convolve(draws.standard_normal(50), np.ones(4) / 2, mode="same")[:40]
            times = seconds * np.exp(load + own * draws.standard_normal() + 0.05 * wave)
            runs.append(Timed(items=np.full(40, 96.0), seconds=times))
    return reference, arm


@pytest.mark.parametrize(("repeats", "own"), [(1, 0.0), (2, 0.03), (3, 0.03), (5, 0.03)])
def test_intervals_cover_the_truth_in_at_least_90_of_100_simulations(repeats: int, own: float) -> None:
    draws = np.random.default_rng(repeats)
    covered = 0
    for seed in range(100):
        reference, arm = simulated(draws, repeats, 1.2, own=own)
        # The load that a pair shares cancels; with one repeat only the noise of the steps is covered.
        covered += ratio_interval(reference, arm, seed=seed).holds(1.2)
    assert covered >= 90


def test_pooled_intervals_are_narrower_and_cover_the_truth() -> None:
    """Six arms of two repeats that share the runs of the reference."""
    draws = np.random.default_rng(1)
    covered, alone, pooled = 0, [], []
    for seed in range(100):
        loads = 0.2 * draws.standard_normal(2)

        def arm(seconds: float, loads: np.ndarray = loads) -> list[Timed]:
            own = 0.03 * draws.standard_normal(2)
            times = [
                seconds * np.exp(a + b + 0.05 * draws.standard_normal(40)) for a, b in zip(loads, own, strict=True)
            ]
            return [Timed(items=np.full(40, 96.0), seconds=each) for each in times]

        reference, arms = arm(0.12), [arm(0.1) for _ in range(5)]
        spread = launches([[ratio_log(a, b) for a, b in zip(reference, each, strict=True)] for each in arms])
        found = ratio_interval(reference, arms[0], spread=spread, seed=seed)
        covered += found.holds(1.2)
        pooled.append(found.high - found.low)
        single = ratio_interval(reference, arms[0], seed=seed)
        alone.append(single.high - single.low)
    assert covered >= 90
    assert np.mean(pooled) < np.mean(alone) / 1.5


def test_the_same_seed_gives_the_same_interval_of_enough_resamples() -> None:
    reference, arm = simulated(np.random.default_rng(0), 3, 1.2, own=0.03)
    assert ratio_interval(reference, arm, seed=7) == ratio_interval(reference, arm, seed=7)
    assert RESAMPLES >= 2000


def test_a_faster_arm_is_faster_and_an_equal_one_shows_no_difference() -> None:
    reference = make_arm("reference", [make_run(seed=i) for i in range(3)])
    fast = make_arm("fast", [make_run(seed=10 + i, seconds=0.05) for i in range(3)])
    equal = make_arm("equal", [make_run(seed=20 + i) for i in range(3)])
    found = speeds(Comparison(arms=[reference, fast, equal], reference="reference"))
    assert found["fast"].sentence.startswith("faster: ")
    assert found["fast"].ratio is not None
    assert found["fast"].ratio.value == pytest.approx(2, rel=0.05)
    assert found["equal"].sentence.startswith("no difference shown: ")
    assert found["reference"].ratio is None
    assert found["reference"].items_per_second.value == pytest.approx(960, rel=0.05)


def test_one_repeat_says_that_the_interval_covers_steps_only() -> None:
    arms = [make_arm("reference", [make_run()]), make_arm("other", [make_run(seed=1)])]
    assert "covers their steps only" in speeds(Comparison(arms=arms, reference="reference"))["other"].sentence


def test_slow_first_steps_are_left_out_of_every_run() -> None:
    slow = make_run()
    for line in slow.train[:6]:
        line["seconds"] = 1.0
    arms = [make_arm("reference", [make_run()]), make_arm("other", [slow])]
    found = speeds(Comparison(arms=arms, reference="reference"))
    assert found["other"].warm_up == found["reference"].warm_up == 6
    assert found["other"].ratio is not None
    assert found["other"].ratio.value == pytest.approx(1, rel=0.05)


def test_a_repeat_that_failed_leaves_the_others_in_their_pairs() -> None:
    # The machine is twice as slow during the second repeat.
    reference = make_arm("reference", [make_run(seconds=0.1), make_run(seconds=0.2)])
    arm = make_arm("other", [make_run(status="failed"), make_run(seed=1, seconds=0.2)])
    found = speeds(Comparison(arms=[reference, arm], reference="reference"))["other"]
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(1, rel=0.05)


def test_runs_of_very_few_steps_have_no_speed() -> None:
    arms = [make_arm("reference", [make_run()]), make_arm("other", [make_run(steps=3)])]
    assert "other" not in speeds(Comparison(arms=arms, reference="reference"))
