"""How a recipe is run to be checked, and what a difference is laid to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardkit.compare.finding import LEAST, QUANTITIES, TOLERANCES, Finding, cause, narrowed
from shardkit.compare.place import AGAIN, RECUT, WHOLE, Place
from shardkit.compare.probe import Probe, cut
from shardkit.engines import registry
from shardkit.errors import RequestError
from shardkit.recipe.load import load
from shardkit.recipe.schema import Batch, Recipe

TWO = Place(backend="ddp", world_size=2)


def recipe(*words: str) -> Recipe:
    return load("digits-resnet", list(words), options_of=registry.options_of).recipe


def settings(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


@pytest.mark.parametrize(
    ("batch", "place", "micro"),
    [
        ((16, 4), WHOLE, 4),
        ((16, 4), RECUT, 2),
        ((16, 16), WHOLE, 8),
        # BatchNorm may not take one item.
        ((16, 2), RECUT, 4),
        ((16, 1), RECUT, 2),
        ((16, 4), TWO, 4),
        ((16, 8), TWO, 4),
        ((2, 2), WHOLE, 1),
        ((2, 2), RECUT, 2),
    ],
)
def test_windows_are_cut_into_two_micro_batches_or_more(batch: tuple[int, int], place: Place, micro: int) -> None:
    words = cut(Batch(global_batch_size=batch[0], micro_batch_size=batch[1]), place)
    assert words == (f"batch.micro_batch_size={micro}", f"launch.nproc_per_node={place.world_size}")


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(RequestError, match="global_batch_size=2 cannot be cut into two micro-batches on each of 2"):
        cut(Batch(global_batch_size=2, micro_batch_size=1), TWO)


def test_the_last_window_is_ragged_where_the_data_allow_it_and_no_more_steps_are_made_than_the_recipe_has() -> None:
    whole = Probe(recipe=recipe("batch.global_batch_size=96", "train.max_steps=10"), items=1437)
    assert (whole.count, whole.steps) == (2 * 96 + 48 + 1, 3)
    assert Probe(recipe=recipe("batch.global_batch_size=96", "train.max_steps=2"), items=1437).steps == 2
    epochs = recipe("batch.global_batch_size=96", "train.max_steps=null", "train.max_epochs=1", "scheduler=null")
    short = Probe(recipe=epochs, items=100)
    assert (short.count, short.steps) == (100, 2)
    train = json.loads(settings(short.stepped(WHOLE, 1.0))["data.train"])
    assert (train["_target_"], train["count"]) == ("shardkit.data.first.First", 100)
    assert settings(short.gradient(WHOLE))["train.max_grad_norm"] == "null"


@pytest.mark.parametrize(("limit", "norm", "clip"), [("null", 3.0, "1.5"), ("1.0", 0.5, "0.25"), ("0.1", 3.0, "0.1")])
def test_clipping_is_on_whatever_the_recipe_has(limit: str, norm: float, clip: str) -> None:
    probe = Probe(recipe=recipe(f"train.max_grad_norm={limit}"), items=1437)
    assert settings(probe.stepped(WHOLE, norm))["train.max_grad_norm"] == clip


def found(first: str = "", *, norm: float = 0.0, weights: float = 0.0, place: Place = TWO) -> Finding:
    return Finding(place=place, errors={**dict.fromkeys(QUANTITIES, 0.0), "weights": weights}, first=first, norm=norm)


def test_weights_are_held_to_what_rounding_does_to_them() -> None:
    tolerance = TOLERANCES["fp32"]
    assert narrowed(tolerance, found(weights=1e-5, place=RECUT))["weights"] == pytest.approx(3e-4)
    assert narrowed(tolerance, found(weights=1e-8, place=RECUT))["weights"] == LEAST
    assert narrowed(tolerance, found(weights=1.0, place=RECUT)) == tolerance
    # Where a window is one forward however it is cut, nothing is measured.
    assert narrowed(tolerance, found(place=RECUT)) == tolerance


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (found("loss at step 1: off"), "the forward"),
        (found("gradient before clipping, at step 1, of a: off", norm=0.5), "the backward"),
        (found("gradient before clipping, at step 1, of a: off"), "the update, as gradient norms agree"),
        (found("grad norm at step 1: off", norm=0.5), "the norm of the gradient"),
        (found("weights after step 1 of a: off"), "the update: clipping, weight decay, or an optimizer"),
        (found("buffers after step 1 of a: off"), "a buffer that follows what a rank sees"),
        (found("loss at step 3: off"), "unknown"),
    ],
)
def test_a_cause_is_where_a_fault_shows_first(finding: Finding, said: str) -> None:
    again, recut = found(place=AGAIN), found(place=RECUT)
    assert cause(finding, again, recut, norms=True, draws=False, precision="fp32").startswith(said)


def test_what_one_process_does_alone_is_no_backends_fault() -> None:
    finding, again = found("loss at step 1: off"), found(place=AGAIN)
    recut = found("loss at step 1: off by 1", place=RECUT)

    def said(again: Finding, recut: Finding, *, norms: bool = False, draws: bool = False) -> str:
        return cause(finding, again, recut, norms=norms, draws=draws, precision="fp32")

    assert said(replace(again, first="loss at step 1"), recut).startswith("the reference differs from itself")
    assert said(again, recut, draws=True).startswith("random numbers that training draws")
    assert said(again, recut, norms=True).startswith("BatchNorm statistics")
    assert said(again, recut).endswith(
        "; one process alone differs too when it cuts windows otherwise (loss at step 1)"
    )
    # One that did not run shows nothing.
    assert said(again, Finding(place=RECUT, error="failed", errors={})).startswith("the forward")
