"""The sections about checkpoints: what they say by default, what they refuse, and what they tell the loop."""

from __future__ import annotations

import math

import pytest

from shardkit.recipe.schema import Checkpoint
from tests.unit.recipe.conftest import Load, Refuse

EVAL = "data.eval={_target_: torch.utils.data.TensorDataset}"


def test_a_recipe_that_says_nothing_saves_nothing_and_resumes_by_itself(load_text: Load) -> None:
    recipe = load_text().recipe
    assert not recipe.checkpoint.wanted and not recipe.saves
    assert (recipe.checkpoint.resume, recipe.checkpoint.keep_last, recipe.checkpoint.final) == ("auto", 2, True)
    assert (recipe.init_from, recipe.load.strict, recipe.load.groups) == (None, True, "checkpoint")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("checkpoint.every=10", True),
        ("checkpoint.every_minutes=0.5", True),
        ("checkpoint.keep_best=eval/loss", True),
        ("train.stop_at_step=5", False),
    ],
)
def test_a_run_saves_where_anything_asks_for_checkpoints(load_text: Load, override: str, wanted: bool) -> None:
    recipe = load_text(EVAL, override).recipe
    assert recipe.checkpoint.wanted is wanted and recipe.saves


def test_everything_can_be_given(load_text: Load) -> None:
    text = """\
checkpoint: {every: 50, every_minutes: 10, final: false, keep_last: null, keep_best: eval/top1_error, best: lowest,
  resume: runs/old, asynchronous: true, verify: size, on_save_error: warn, export: true, folder: "s3://bucket/x"}
load: {strict: false, include: ["backbone.*"], exclude: ["*.bias"], cast: true, groups: recipe}
init_from: weights.safetensors
"""
    loaded = load_text(EVAL, "train.stop_at_step=100", extra=text)
    checkpoint, load = loaded.recipe.checkpoint, loaded.recipe.load
    assert (checkpoint.every, checkpoint.every_minutes, checkpoint.keep_last) == (50, 10.0, None)
    assert (checkpoint.resume, checkpoint.folder, checkpoint.best_metric) == ("runs/old", "s3://bucket/x", "top1_error")
    assert (load.include, load.exclude, load.groups) == (["backbone.*"], ["*.bias"], "recipe")
    assert load_text(text=loaded.to_yaml()).recipe == loaded.recipe


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("checkpoint.every=0", "0 is not a number of steps; expected 1 or more, or null"),
        ("checkpoint.every_minutes=0", "0.0 is no time between checkpoints; expected minutes above 0"),
        ("checkpoint.every_minutes=.inf", "inf is no time between checkpoints; expected minutes above 0"),
        ("checkpoint.keep_last=0", "0 would keep nothing to go on from; expected 1 or more, or null to keep all"),
        (
            "checkpoint.keep_best=accuracy",
            "'accuracy' is no metric of the evaluation; expected eval/NAME, as in eval/accuracy",
        ),
        (
            "checkpoint.keep_best=eval/",
            "'eval/' is no metric of the evaluation; expected eval/NAME, as in eval/accuracy",
        ),
        ("checkpoint.best=lowest", "lowest says nothing without keep_best: give that too, or leave this out"),
        ("checkpoint.best=lower", "'lower' is not one of auto, highest, lowest; did you mean 'lowest'?"),
        ("checkpoint.resume=''", "is empty; expected auto, never, or the path of a checkpoint"),
        (
            "checkpoint.folder=''",
            "is empty; expected a path or an fsspec URL, or null for checkpoints/ in the run folder",
        ),
        ("load.include=['']", "holds an empty text, which matches no name; expected globs, as in ['backbone.*']"),
        ("load.exclude=[a, '']", "holds an empty text, which matches no name; expected globs, as in ['backbone.*']"),
        ("init_from=''", "is empty; expected the path of a checkpoint, a .safetensors file or a folder, or null"),
        ("train.stop_at_step=0", "0 is not a step to stop at; expected 1 or more, or null"),
        (
            "train.stop_at_step=101",
            "step 101 is never reached: the run has max_steps 100; expected that or less, or null",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(refuse: Refuse, override: str, said: str) -> None:
    (problem,) = refuse(EVAL, override)
    assert (problem.key, problem.place) == (override.partition("=")[0], f"command line {override!r}")
    assert problem.message == said


def test_the_best_needs_an_evaluation(refuse: Refuse) -> None:
    (problem,) = refuse("checkpoint.keep_best=eval/loss")
    assert problem.key == "checkpoint.keep_best"
    assert problem.message == "there is nothing to evaluate: give data.eval, or leave this out"


def test_a_last_step_may_be_the_one_to_stop_at(load_text: Load) -> None:
    assert load_text("train.stop_at_step=100").recipe.train.stop_at_step == 100
    assert load_text("train.max_steps=null", "train.max_epochs=2", "train.stop_at_step=5").recipe.saves


@pytest.mark.parametrize("name", ["loss", "error", "perplexity", "top1_error", "valid/loss"])
def test_losses_errors_and_perplexities_are_better_when_they_are_lower(name: str) -> None:
    checkpoint = Checkpoint(keep_best=f"eval/{name}")
    assert checkpoint.best_metric == name
    assert checkpoint.is_better(1.0, 2.0) and not checkpoint.is_better(2.0, 1.0)
    assert Checkpoint(keep_best=f"eval/{name}", best="highest").is_better(2.0, 1.0)


@pytest.mark.parametrize("name", ["accuracy", "lossless", "f1"])
def test_other_metrics_are_better_when_they_are_higher(name: str) -> None:
    checkpoint = Checkpoint(keep_best=f"eval/{name}")
    assert checkpoint.is_better(2.0, 1.0) and not checkpoint.is_better(1.0, 2.0)
    assert not checkpoint.is_better(1.0, 1.0)
    assert Checkpoint(keep_best=f"eval/{name}", best="lowest").is_better(1.0, 2.0)


def test_a_first_value_is_the_best_and_nan_never_is() -> None:
    checkpoint = Checkpoint(keep_best="eval/loss")
    assert checkpoint.is_better(3.0, None) and checkpoint.is_better(3.0, math.nan)
    assert not checkpoint.is_better(math.nan, 3.0) and not checkpoint.is_better(math.nan, None)
