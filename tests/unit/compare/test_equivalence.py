"""Equal runs are equivalent, always; planted faults are found, at their step, by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from shardkit.compare.equivalence import equivalence
from shardkit.compare.results import Arm, Comparison, Run
from shardkit.compare.verdict import Verdict, are_equal, verdicts
from tests.comparisons import BATCH_NORM, changed, make_arm, make_run


def judged(arm: Arm, *, reference: Arm | None = None, noise: list[Run] | None = None, **more: Any) -> Verdict:
    """The verdict on an arm beside one equal to the recipe."""
    beside = reference or make_arm("reference", [make_run()], BATCH_NORM)
    return verdicts(Comparison(arms=[beside, arm], reference=beside.name, noise=noise, **more))[arm.name]


def test_two_hundred_pairs_apart_by_rounding_are_equivalent() -> None:
    for seed in range(200):
        # A smooth model, one that amplifies slowly, one that amplifies fast.
        amplification = (1.0, 1.1, 1.5)[seed % 3]
        arm = make_arm("other", [make_run(seed=seed + 1, rounding=3e-8, amplification=amplification)])
        reference = make_arm("reference", [make_run(seed=seed)])
        found = equivalence(Comparison(arms=[reference, arm], reference="reference"), arm)
        assert found.verdict == "equivalent", found.sentence


def test_sixty_pairs_of_bf16_runs_are_equivalent() -> None:
    for seed in range(60):
        runs = [make_run(seed=2 * seed + i, rounding=5e-5, amplification=1.1) for i in (0, 1)]
        reference, arm = (make_arm(f"arm{i}", [run], train__precision="bf16-mixed") for i, run in enumerate(runs))
        found = equivalence(Comparison(arms=[reference, arm], reference=reference.name), arm)
        assert found.verdict == "equivalent", found.sentence
        assert found.dtype == "bf16"


def test_identical_arms_are_equivalent_in_20_of_20_and_bit_equal() -> None:
    for seed in range(20):
        arm = make_arm("other", [make_run(seed=seed, rounding=1e-7), make_run(seed=seed, rounding=1e-7)])
        reference = make_arm("reference", arm.runs)
        found = judged(arm, reference=reference, noise=[make_run(seed=seed, rounding=1e-7)])
        assert found.outcome == "equivalent"
        assert found.equivalence.bit_equal
        assert "last bit" in found.equivalence.sentence


def test_an_activation_that_flips_is_no_fault() -> None:
    """As measured on digits-resnet with policy exact, ddp at 2 processes against one: see tolerance.py."""
    loss = {7: 2e-7, 8: 4e-7, 9: 3e-5, 10: 5e-5, 12: 1e-4, 13: 4e-4, 16: 1e-3, 21: 2e-3, 23: 3e-3, 30: 6e-3}
    norm = {7: 1e-4, 8: 3e-4, 11: 3e-3, 13: 1e-2, 19: 3e-2, 30: 4e-2}
    run = make_run()
    for name, apart in (("loss", loss), ("grad_norm", norm)):
        for step, difference in apart.items():
            already = 1 + apart.get(max((s for s in apart if s < step), default=0), 0.0)
            run = changed(run, step, **{name: (1 + difference) / already})
    assert judged(make_arm("other", [run], backend__name="single")).outcome == "equivalent"


PLANTED: list[tuple[str, dict[str, Any], int, dict[str, float], int, str | None]] = [
    # name, settings of the arm, first step that changes, factors, step to be found at, cause
    ("loss divided by the world", {}, 1, {"grad_norm": 0.5}, 1, "no setting differs"),
    ("clipping off", {"train__max_grad_norm": None}, 2, {"loss": 1.0005}, 2, "clipping"),
    ("schedule by micro-step", {}, 2, {"lr": 0.97}, 2, "no setting differs"),
    ("another schedule", {"scheduler__T_max": 60}, 3, {"lr": 1.001}, 3, "schedule"),
    ("bf16 reduction", {}, 2, {"grad_norm": 1.001, "loss": 1.0001}, 2, "no setting differs"),
    ("another data order", {"data__shuffle": False}, 1, {"loss": 1.01, "grad_norm": 1.04}, 1, "data order"),
    ("another seed", {"seed": 1}, 1, {"loss": 1.005}, 1, "seed"),
    ("dropout", {"model__dropout": 0.1}, 1, {"loss": 1.02}, 1, "dropout"),
    ("a frozen layer", {"parameter_groups": [{"match": "stem.*", "frozen": True}]}, 2, {"loss": 1.0003}, 2, "groups"),
    ("weight decay, as weak as in digits-resnet", {"optimizer__weight_decay": 5e-4}, 2, {"grad_norm": 1.00005}, 2,
     "weight decay"),
    ("BatchNorm by micro-batch", {"batch__micro_batch_size": 12}, 1, {"loss": 1.0014, "grad_norm": 0.92}, 1,
     "BatchNorm statistics by rank and micro-batch"),
    ("bf16 compute", {"train__precision": "bf16-mixed"}, 2, {"loss": 1.0005}, 2, "precision"),
    ("a late fault: the second epoch in another order", {}, 12, {"loss": 1.05}, 12, "no setting differs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "first", "factors", "step", "cause"), PLANTED, ids=[p[0] for p in PLANTED]
)
def test_a_planted_fault_is_found_at_its_step_and_named(
    name: str, settings: dict[str, Any], first: int, factors: dict[str, float], step: int, cause: str
) -> None:
    run = changed(make_run(seed=5, rounding=3e-8), first, **factors)
    found = judged(make_arm("other", [run], BATCH_NORM, **settings))
    assert found.outcome == "different", name
    assert found.equivalence.step == step
    assert found.cause is not None
    assert cause in found.cause
    assert not are_equal({"other": found})


def test_dropout_on_another_number_of_ranks_is_named() -> None:
    reference = make_arm("reference", [make_run()], model__dropout=0.1)
    runs = [changed(make_run(environment={"world_size": 4}), 1, loss=1.01)]
    found = judged(make_arm("other", runs, {"normalization": {"layers": []}}, model__dropout=0.1), reference=reference)
    assert found.cause is not None
    assert "dropout" in found.cause
    assert "world size: 2 -> 4" in found.cause


def test_a_change_without_effect_is_equivalent() -> None:
    found = judged(make_arm("other", [make_run()], train__max_grad_norm=None))
    assert found.outcome == "equivalent"
    assert found.cause is None


def test_a_nan_in_one_run_is_a_difference_and_in_both_is_none() -> None:
    run = make_run()
    broken = Run(**{**run.__dict__, "train": [{**line, "loss": None} if line["step"] == 5 else line
                                             for line in run.train]})  # fmt: skip
    found = judged(make_arm("other", [broken]))
    assert (found.outcome, found.equivalence.step) == ("different", 5)
    assert found.equivalence.difference == math.inf
    assert "not finite" in found.equivalence.sentence
    assert judged(make_arm("other", [broken]), reference=make_arm("reference", [broken])).outcome == "equivalent"


def test_noise_of_the_reference_widens_the_bound() -> None:
    noisy = [make_run(seed=i, rounding=3e-5) for i in range(3)]
    reference, arm = make_arm("reference", noisy[:1]), make_arm("other", noisy[1:2])
    assert judged(arm, reference=reference).outcome == "different"
    found = judged(arm, reference=reference, noise=noisy[2:])
    assert found.outcome == "equivalent"
    assert found.equivalence.noise == "measured"


def test_a_reference_too_far_from_itself_is_inconclusive() -> None:
    noisy = [make_run(seed=i, rounding=0.05) for i in range(3)]
    found = judged(make_arm("other", noisy[1:2]), reference=make_arm("reference", noisy[:1]), noise=noisy[2:])
    assert found.outcome == "inconclusive"
    assert "too noisy" in found.equivalence.sentence


def test_two_steps_are_too_few() -> None:
    found = judged(make_arm("other", [make_run(steps=2)]))
    assert found.outcome == "inconclusive"
    assert "too few" in found.equivalence.sentence


def test_an_arm_that_failed_says_why_and_others_are_judged() -> None:
    gone = Run(folder=make_run().folder, status="failed", error="Traceback\nRuntimeError: no memory")
    found = judged(make_arm("other", [gone]))
    assert found.outcome == "failed"
    assert "RuntimeError: no memory" in found.equivalence.sentence
    assert "RuntimeError: no memory" in found.errors[0]
    # One repeat that completed is enough.
    assert judged(make_arm("other", [gone, make_run()])).outcome == "equivalent"


def test_a_reference_that_failed_leaves_nothing_to_compare_with() -> None:
    gone = make_arm("reference", [Run(folder=make_run().folder, status="failed", error="x")])
    assert judged(make_arm("other", [make_run()]), reference=gone).outcome == "inconclusive"


def test_repeats_that_do_not_agree_are_told() -> None:
    runs = [make_run(), changed(make_run(), 4, loss=1.1)]
    found = judged(make_arm("other", runs), reference=make_arm("reference", [make_run()]))
    assert (found.outcome, found.equivalence.step) == ("different", 4)
    assert "1 of 2 repeats do not show it" in found.equivalence.sentence


def test_only_the_asked_steps_count() -> None:
    run = changed(make_run(), 20, loss=1.5)
    assert judged(make_arm("other", [run]), steps=19).outcome == "equivalent"
    assert judged(make_arm("other", [run])).equivalence.step == 20


def test_a_loss_near_zero_is_compared_on_the_scale_of_the_first() -> None:
    """The digits of a loss of 1e-6 are those of the logits it came from."""
    tiny = [
        Run(**{**run.__dict__, "train": [{**line, "loss": 2.3 if line["step"] == 1 else 1e-6 + off}
                                        for line in run.train]})
        for run, off in ((make_run(), 0.0), (make_run(), 3e-8))
    ]  # fmt: skip
    found = judged(make_arm("other", tiny[1:]), reference=make_arm("reference", tiny[:1]))
    assert found.outcome == "equivalent"


def evaluated(run: Run, *losses: float | None) -> Run:
    evals = [{"kind": "eval", "step": 10 * (i + 1), "loss": loss, "items": 9} for i, loss in enumerate(losses)]
    return replace(run, evals=evals)


def test_losses_of_evaluations_are_held_to_each_other() -> None:
    reference = make_arm("reference", [evaluated(make_run(), 1.5, 1.0, 0.5)], BATCH_NORM)
    equal = judged(make_arm("other", [evaluated(make_run(), 1.5, 1.0 + 1e-6, 0.5)]), reference=reference)
    assert equal.outcome == "equivalent" and "(of evaluations within 1.0e-06)" in equal.equivalence.sentence
    arm = make_arm("other", [evaluated(make_run(), 1.5, 1.2, 0.5)], normalization__policy="deferred")
    found = judged(arm, reference=reference)
    assert (found.outcome, found.equivalence.curve, found.equivalence.step) == ("different", "eval_loss", 20)
    assert found.equivalence.sentence.startswith("different from step 20 on: the evaluation loss differs by 2.0e-01")
    assert found.cause and found.cause.startswith("BatchNorm statistics")
    # A run that did not evaluate, or not at these steps, says nothing of it; what is not finite does.
    assert judged(make_arm("other", [make_run()]), reference=reference).outcome == "equivalent"
    broken = judged(make_arm("other", [evaluated(make_run(), 1.5, None, 0.5)]), reference=reference)
    assert broken.outcome == "different" and "is not finite in one of the two" in broken.equivalence.sentence


def test_that_evaluations_were_not_compared_is_said() -> None:
    def said(one: Run, other: Run) -> str:
        found = judged(make_arm("other", [other]), reference=make_arm("reference", [one], BATCH_NORM))
        assert found.outcome == "equivalent"
        return found.equivalence.sentence

    run, late = evaluated(make_run(), 1.5), evaluated(make_run(), *[None] * 3)
    assert "valuation" not in said(make_run(), make_run())
    assert said(run, make_run()).endswith("Evaluations were not compared: only one of the two made any.")
    odd = replace(run, evals=[{**run.evals[0], "step": 11}])
    assert said(run, odd).endswith("Evaluations were not compared: no step in common.")
    assert late.evals[2]["step"] == 30
    # By the law of an evaluation a difference after step 21 is no evidence.
    one, other = (replace(run, evals=[{**late.evals[2], "loss": loss}]) for loss in (0.5, 0.6))
    assert said(one, other).endswith(
        "Evaluations were not compared: at the first, step 30, rounding alone may do more to a sensitive model."
    )


def test_an_update_that_an_evaluation_shows_first_is_not_laid_on_the_evaluation() -> None:
    reference = make_arm("reference", [evaluated(make_run(), 1.5, 1.0)], BATCH_NORM)
    run = changed(evaluated(make_run(), 1.6, 1.2), 11, loss=1.1)
    settings = {"optimizer__weight_decay": 0.1, "data__eval": {"_target_": "data.Other"}}
    found = judged(make_arm("other", [run], **settings), reference=reference)
    assert (found.equivalence.curve, found.equivalence.step) == ("eval_loss", 10)
    assert found.cause and found.cause.startswith("weight decay")
    # At the same step what the step itself was comes first.
    rate = changed(evaluated(make_run(), 1.6, 1.2), 10, lr=0.5)
    assert judged(make_arm("other", [rate]), reference=reference).equivalence.curve == "lr"


def test_runs_without_a_training_step_in_common_are_too_few_steps() -> None:
    one, other = (evaluated(make_run(), 1.5, 1.0, 0.5) for _ in range(2))
    one = replace(one, train=one.train[::2])
    other = replace(other, train=other.train[1::2])
    found = judged(make_arm("other", [other]), reference=make_arm("reference", [one]))
    assert found.outcome == "inconclusive" and "0 steps in common are too few" in found.equivalence.sentence


def test_a_difference_just_above_the_bound_is_shown_to_be_more() -> None:
    reference = make_arm("reference", [evaluated(make_run(), 1.0)], BATCH_NORM)
    bound = 2e-6 * 10**3.5
    found = judged(make_arm("other", [evaluated(make_run(), 1.0 * (1 + 1.002 * bound))]), reference=reference)
    assert "differs by 6.3372e-03" in found.equivalence.sentence and "explains 6.3246e-03" in found.equivalence.sentence


def test_where_backends_differ_too_rounding_may_be_what_an_inert_setting_is_blamed_for() -> None:
    # As zero3 beside ddp on digits-resnet: an activation flips at step 25, and clipping never acts.
    reference = make_arm("reference", [make_run()], BATCH_NORM)
    run = changed(make_run(), 25, grad_norm=1 + 5.5e-4)
    inert = {"train__max_grad_norm": 1000.0}
    elsewhere = make_arm("zero3", [run], backend__name="zero3", **inert)
    assert judged(elsewhere, reference=reference).outcome == "equivalent"
    # On the same backend nothing else can have done it.
    here = judged(make_arm("here", [run], **inert), reference=reference)
    assert here.outcome == "different" and here.cause and here.cause.startswith("clipping of gradients")


@pytest.mark.parametrize("setting", [{"optimizer__weight_decay": 0.1}, {"train__max_grad_norm": 2.0}])
def test_a_fault_under_bf16_is_no_rounding_on_the_same_backend(setting: dict[str, Any]) -> None:
    mixed = {"train__precision": "bf16-mixed"}
    reference = make_arm("reference", [make_run()], BATCH_NORM, **mixed)
    # The loss of chars-gpt without weight decay is 5.4e-4 from that with it after 30 steps.
    arm = make_arm("other", [changed(make_run(), 12, loss=1 + 2e-4)], **mixed, **setting)
    found = judged(arm, reference=reference)
    assert found.outcome == "different" and found.equivalence.step == 12
    # Another backend rounds otherwise.
    arm = make_arm("other", arm.runs, **mixed, **setting, backend__name="zero3")
    assert judged(arm, reference=reference).outcome == "equivalent"


def test_another_precision_is_held_to_the_finer_one() -> None:
    reference = make_arm("reference", [make_run()], BATCH_NORM)
    arm = make_arm("other", [changed(make_run(), 1, loss=1 + 2e-5)], train__precision="bf16-mixed")
    found = judged(arm, reference=reference)
    assert (found.outcome, found.equivalence.dtype, found.equivalence.step) == ("different", "fp32", 1)
    assert found.cause and found.cause.startswith("precision")


def test_initial_weights_are_named_and_those_that_a_comparison_makes_are_not() -> None:
    seed = {"init_from": "out/seed-0123456789ab.safetensors", "load": {"strict": False, "cast": True}}
    own = {"init_from": "other.safetensors", "load": {"strict": True, "cast": False}}
    reference = make_arm("reference", [make_run()], BATCH_NORM, **seed)
    found = judged(make_arm("other", [changed(make_run(), 1, loss=1.5)], **own), reference=reference)
    assert found.cause == "other initial weights (init_from: null -> other.safetensors)"
    elsewhere = make_arm("other", [make_run()], **{**seed, "init_from": "there/seed-ba9876543210.safetensors"})
    assert judged(elsewhere, reference=reference).settings == ()


def test_other_code_is_named_where_no_setting_differs() -> None:
    def run(commit: str) -> Run:
        return replace(make_run(), environment={"git_commit": commit, "packages": {"torch": "2.13.0"}})

    reference = make_arm("reference", [run("aaaa")], BATCH_NORM)
    arm = make_arm("other", [changed(run("bbbb"), 1, loss=1.5)])
    assert judged(arm, reference=reference).cause == "no setting differs, but other code: git_commit aaaa -> bbbb"
    same = make_arm("other", [changed(run("aaaa"), 1, loss=1.5)])
    assert str(judged(same, reference=reference).cause).startswith("no setting differs: non-determinism")


def test_that_no_evaluation_was_made_is_said_where_the_recipe_has_data_for_it() -> None:
    reference = make_arm("reference", [make_run()], BATCH_NORM)
    arm = make_arm("other", [make_run()], data__eval={"_target_": "data.Eval"})
    assert judged(arm, reference=reference).equivalence.sentence.endswith(
        " Evaluations were not compared: none was made."
    )


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ({"data__train__split": "eval"}, "other data"),
        ({"data__shuffle": False}, "another data order"),
        ({"normalization__policy": "group"}, "other norm layers"),
        ({"normalization__policy": "exact"}, "BatchNorm statistics by rank and micro-batch"),
    ],
)
def test_what_is_other_is_called_so(setting: dict[str, Any], cause: str) -> None:
    reference = make_arm("reference", [make_run()], BATCH_NORM)
    found = judged(make_arm("other", [changed(make_run(), 1, loss=1.5)], BATCH_NORM, **setting), reference=reference)
    assert found.cause and found.cause.startswith(cause)


def test_steps_that_only_one_of_the_two_made_are_told() -> None:
    reference = make_arm("reference", [make_run()], BATCH_NORM)
    found = judged(make_arm("other", [make_run(steps=8)], train__max_steps=8), reference=reference)
    assert found.equivalence.sentence.endswith(" It made 8 steps, and the reference 30.")
    assert "It made" not in judged(make_arm("other", [make_run()]), reference=reference).equivalence.sentence
