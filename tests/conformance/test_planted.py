"""Faults planted in one arm are found, at the right step, and named; arms that are equal are called equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardkit.compare.results import Arm, Comparison, Run, read_run
from shardkit.compare.verdict import Verdict, verdicts
from shardkit.engines.registry import options_of
from shardkit.recipe.load import load

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/digits-resnet.yaml"
RUN = "tests.conformance.run_ranks:run_recipe"
STEPS = 10
BASE = [
    "model.width=4",
    "normalization.policy=exact",
    "train.max_grad_norm=0.4",
    f"train.max_steps={STEPS}",
    "scheduler.T_max=150",
    "evaluation.every=null",
    "data.eval=null",
    "checkpoint={}",
]
PLANTED = "tests.conformance.planted"
QUICK = ("loss divided by the world size", "clipping off", "BatchNorm by micro-batch", "a backend that sums")
# The others are run by make test-slow.
# Name -> (settings of the arm, the step from which it shows, what the cause names).
FAULTS: dict[str, tuple[list[str], int, str]] = {
    "loss divided by the world size": ([f"loss._target_={PLANTED}.DividedLoss"], 1, "loss"),
    "clipping off": (["train.max_grad_norm=null"], 2, "max_grad_norm"),
    "schedule per micro-batch": ([f"scheduler._target_={PLANTED}.PerMicroBatch"], 2, "schedule"),
    "bf16": (["train.precision=bf16-mixed"], 1, "precision"),
    "data order": (["data.shuffle=false"], 1, "order"),
    "dropout": ([f"model._target_={PLANTED}.Dropping"], 1, "model"),
    "a frozen layer": ([f"model._target_={PLANTED}.Frozen"], 1, "model"),
    "weight decay": (["optimizer.weight_decay=0.05"], 2, "weight decay"),
    "another learning rate": (["optimizer.lr=0.11"], 1, "learning-rate"),
    "BatchNorm by micro-batch": (["normalization.policy=keep", "batch.micro_batch_size=8"], 1, "BatchNorm"),
    "a backend that sums": (
        ["backend={adapter: 'tests.third_party.engines:SummingEngine', name: summing}"],
        1,
        "the backends differ",
    ),
}


class Runs:
    """Arms that are run once each."""

    def __init__(self, launch_ranks: Callable[..., list[Any]], folder: Path) -> None:
        self._launch, self._folder = launch_ranks, folder
        self.noise: list[Run] | None = None

    def arm(self, name: str, settings: list[str], backend: str = "ddp", world: int = 2) -> Arm:
        overrides = [*BASE, f"backend={backend}", *settings]
        folder = self._folder / name.replace(" ", "-")
        self._launch(world, RUN, RECIPE, overrides, str(folder))
        recipe = asdict(load(ROOT / RECIPE, overrides, options_of=options_of).recipe)
        return Arm(name=name, command="", recipe=recipe, runs=[read_run(folder)])

    def judged(self, reference: Arm, arm: Arm) -> Verdict:
        if self.noise is None:
            self.noise = self.arm("again", []).runs
        found = Comparison(arms=[reference, arm], reference=reference.name, noise=self.noise)
        return verdicts(found)[arm.name]


@pytest.fixture(scope="module")
def runs(launch_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(launch_ranks, tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def reference(runs: Runs) -> Arm:
    return runs.arm("reference", [])


@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAULTS])
def test_a_planted_fault_is_found_and_named(runs: Runs, reference: Arm, fault: str) -> None:
    settings, step, named = FAULTS[fault]
    verdict = runs.judged(reference, runs.arm(fault, settings))
    assert verdict.outcome == "different"
    assert verdict.equivalence.step == step, verdict.equivalence
    assert verdict.cause and named in verdict.cause, verdict.cause


def test_running_statistics_that_drift_are_found_by_evaluations(runs: Runs) -> None:
    """Deferred normalises by the micro-batch as keep does, and moves running statistics once a logical batch."""
    evaluated = ["data.eval={_target_: shardkit.data.digits.Digits, split: eval}", "evaluation.every=5"]

    def arm(name: str, policy: str, backend: str = "ddp") -> Arm:
        return runs.arm(name, [*evaluated, f"normalization.policy={policy}"], backend)

    keep = arm("keep", "keep")
    verdict = runs.judged(keep, arm("deferred", "deferred"))
    assert (verdict.outcome, verdict.equivalence.curve, verdict.equivalence.step) == ("different", "eval_loss", 5)
    assert verdict.cause and "BatchNorm statistics" in verdict.cause, verdict.cause
    (loss,) = [curve for curve in verdict.equivalence.curves if curve.name == "loss"]
    assert loss.first is None and max(loss.difference) < 1e-6
    verdict = runs.judged(arm("exact", "exact"), arm("exact elsewhere", "exact", "zero2"))
    assert verdict.outcome == "equivalent" and "(of evaluations " in verdict.equivalence.sentence


@pytest.mark.parametrize(
    "place",
    [
        ("zero2", 2),
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in [
                ("fsdp2", 2),
                ("zero1", 2),
                ("zero3", 2),
                ("single", 1),
                ("accelerate-zero2", 2),
                ("zero2", 4),
            ]
        ),
    ],
    ids=str,
)
def test_backends_that_are_equal_are_called_equal(runs: Runs, reference: Arm, place: tuple[str, int]) -> None:
    verdict = runs.judged(reference, runs.arm(f"equal-{place[0]}", [], *place))
    assert verdict.outcome == "equivalent", verdict.equivalence


def test_an_arm_is_equal_to_itself_to_the_bit(runs: Runs, reference: Arm) -> None:
    verdict = runs.judged(reference, runs.arm("itself", []))
    assert verdict.outcome == "equivalent"
    assert [line["loss"] for line in reference.runs[0].train] == [
        line["loss"] for line in runs.arm("twin", []).runs[0].train
    ]


@pytest.mark.slow
def test_twenty_of_twenty_repeats_are_equal(runs: Runs, reference: Arm) -> None:
    for number in range(20):
        arm = runs.arm(f"repeat {number}", [])
        verdict = runs.judged(reference, arm)
        assert verdict.outcome == "equivalent" and verdict.equivalence.bit_equal, (number, verdict.equivalence)
