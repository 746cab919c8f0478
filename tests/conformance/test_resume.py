"""A run that is stopped in the middle of an epoch and goes on elsewhere is the run that was not stopped."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = "recipes/digits-resnet.yaml"
RUN = "tests.conformance.run_ranks:run_recipe"
STEPS = 18
# An epoch of 1437 digits is 15 windows of 96.
FULL, ITEMS = 15, 1437
DIGITS = [
    "data.train._target_=tests.conformance.run_ranks.NumberedDigits",
    "data.train.noise=0.1",
    "data.eval._target_=tests.conformance.run_ranks.NumberedDigits",
    "loss._target_=tests.conformance.run_ranks.Ledger",
    "normalization.policy=exact",
    "batch.micro_batch_size=8",
    "model.width=4",
    f"train.max_steps={STEPS}",
]
Place = tuple[str, int]


def run(launch_ranks: Callable[..., list[Any]], place: Place, folder: Path, ledger: Path, *more: str) -> dict[str, Any]:
    backend, world = place
    overrides = [*DIGITS, f"backend={backend}", f"loss.path={ledger}", *more]
    return launch_ranks(world, RUN, RECIPE, overrides, str(folder))[0]


def seen(ledger: Path) -> list[int]:
    """The numbers of all items all ranks trained on."""
    return [int(n) for path in ledger.parent.glob(f"{ledger.name}-*") for n in path.read_text().split()]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(("zero2", 2), ("fsdp2", 1), id="zero2-fsdp2"),
        pytest.param(("fsdp2", 2), ("zero3", 3), id="fsdp2-zero3", marks=pytest.mark.slow),
        pytest.param(("zero2", 3), ("fsdp2", 4), id="zero2-fsdp2-4", marks=pytest.mark.slow),
        pytest.param(("accelerate-zero3", 2), ("ddp", 4), id="accelerate", marks=pytest.mark.slow),
    ],
)
def test_a_stop_in_the_middle_of_an_epoch_changes_nothing(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, source: Place, target: Place
) -> None:
    stop = random.randrange(2, FULL - 1)
    print("stopped at step", stop)
    whole = run(launch_ranks, target, tmp_path / "whole", tmp_path / "all")
    assert not whole["stopped"] and len(whole["losses"]) == STEPS
    first = run(
        launch_ranks, source, tmp_path / "run", tmp_path / "before", f"train.stop_at_step={stop}", "data.num_workers=2"
    )
    assert first["stopped"] and max(first["losses"]) == stop
    assert first["lines"][-1]["status"] == "stopped" and first["lines"][-1]["resumable"] is True
    second = run(launch_ranks, target, tmp_path / "run", tmp_path / "after", "data.num_workers=2")
    assert second["losses"].keys() == whole["losses"].keys()
    for step, loss in whole["losses"].items():
        assert second["losses"][step] == pytest.approx(loss, rel=2e-5), f"step {step}, stopped at {stop}"
    assert second["evals"][STEPS]["loss"] == pytest.approx(whole["evals"][STEPS]["loss"], rel=1e-4)
    # Each item once in the epoch that was cut, and the beginning of the next.
    counted = Counter(seen(tmp_path / "before")) + Counter(seen(tmp_path / "after"))
    rest = (STEPS - FULL) * 96
    assert set(counted) == set(range(ITEMS)) and sum(counted.values()) == ITEMS + rest
    assert sum(count == 2 for count in counted.values()) == rest
    assert counted == Counter(seen(tmp_path / "all"))
