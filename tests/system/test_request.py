"""A launch that asks for what cannot be done says so, and starts and writes nothing."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.system.launches import RECIPE, Ended, launch

MISTAKES = """\
name: toy
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data:
  train: {_target_: toy.Numbers}
  shufle: true
loss: {_target_: toy.Squares}
optimizer: {_target_: torch.optim.SGD, lr: 0.05}
batch: {global_batch_size: eight, micro_batch_size: 2}
train: {max_steps: 7, max_epochs: 1, precision: bf61, max_grad_norm: -1}
backend: ddpp
metrics: {every: 0}
"""
# The line of each mistake; where in the line is for the tests of recipes to say.
LINES = (5, 8, 9, 9, 9, 10, 11)


def folders(project: Path) -> set[str]:
    return {path.name for path in project.iterdir()} - {"__pycache__"}


@pytest.fixture(scope="module")
def untouched(project: Path):
    """Whatever the tests of this module ask for, the project is as before."""
    before = folders(project)
    yield project
    assert folders(project) == before


def test_a_typo_answers_at_once_without_torch(untouched: Path) -> None:
    blocked = untouched.parent / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    best, ended = float("inf"), None
    for _ in range(3):  # other processes may be in the way
        begun = time.monotonic()
        ended = launch(untouched, "toy.yaml", "train.max_stepps=3", PYTHONPATH=str(blocked))
        best = min(best, time.monotonic() - begun)
    assert ended is not None and ended.code == 2
    assert "train.max_stepps" in ended.err and "max_steps" in ended.err.replace("max_stepps", "")
    assert ended.err.count("\n") == 1
    assert best < 1.5


def test_seven_mistakes_are_seven_located_lines(untouched: Path) -> None:
    (untouched.parent / "mistakes.yaml").write_text(MISTAKES)
    ended = launch(untouched, str(untouched.parent / "mistakes.yaml"))
    lines = ended.err.splitlines()
    assert ended.code == 2
    assert len(lines) == 7, ended.err
    places = [re.match(r".*mistakes\.yaml:(\d+):\d+: ", line) for line in lines]
    assert [int(place[1]) for place in places if place] == list(LINES), ended.err


def test_the_second_pass_tells_all_its_problems_at_once(untouched: Path) -> None:
    ended = launch(
        untouched,
        "toy.yaml",
        "model.in_featuress=4",
        "scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}",
        "backend=single",  # of one process, and the recipe wants two
    )
    assert ended.code == 2, ended.err
    assert "in_featuress" in ended.err
    assert "ReduceLROnPlateau" in ended.err and "metric" in ended.err
    assert "nproc_per_node" in ended.err
    assert "Traceback" not in ended.err


def test_a_run_folder_in_use_is_refused(untouched: Path) -> None:
    used = untouched.parent / "used"
    used.mkdir(exist_ok=True)
    (used / "something").write_text("of another run")
    ended = launch(untouched, "toy.yaml", f"run_dir={used}")
    assert ended.code == 2
    assert "not empty" in ended.err
    assert [path.name for path in used.iterdir()] == ["something"]
    assert ended.err.startswith(f"command line 'run_dir={used}': run_dir: ")


def test_a_folder_that_no_system_takes_is_refused_with_its_place(untouched: Path) -> None:
    for value in ('run_dir="a\\0b"', "run_dir=toy.py/run", f"run_dir={'a' * 300}", f"name={'a' * 101}"):
        ended = launch(untouched, "toy.yaml", value)
        assert ended.code == 2, ended.err
        assert ended.err.startswith(f"command line {value!r}: {value.partition('=')[0]}: ")
        assert ended.err.count("\n") == 1


@pytest.fixture(scope="module")
def dry(untouched: Path) -> Ended:
    return launch(untouched, "toy.yaml", "optimizer.lr=0.25", "--dry-run", RANK="3", WORLD_SIZE="8")


def test_a_dry_run_says_what_would_run(dry: Ended) -> None:
    assert dry.code == 0, dry.err
    assert "lr: 0.25" in dry.out and "command line" in dry.out
    assert "world size    2" in dry.out
    assert "accumulation  2" in dry.out
    assert "runs/toy/" in dry.out
    assert "torchrun --standalone --nproc-per-node=2" in dry.out
    assert "-m shardkit.launch toy.yaml optimizer.lr=0.25" in dry.out


def test_left_over_rank_variables_are_named_and_ignored(dry: Ended) -> None:
    lines = [line for line in dry.err.splitlines() if "RANK=3" in line]
    assert len(lines) == 1
    assert "WORLD_SIZE=8" in lines[0]


def test_the_console_command_launches_too(untouched: Path) -> None:
    code = "import sys; from shardkit.cli import main; main()"
    (untouched.parent / "console.py").write_text(code)
    listed = launch(untouched, "backends", module="console", PYTHONPATH=str(untouched.parent))
    assert "zero2" in listed.out and "gradients sharded" in listed.out and "Adapter" not in listed.out
    ended = launch(
        untouched,
        "launch",
        "toy.yaml",
        "train.max_stepps=3",
        module="console",
        PYTHONPATH=str(untouched.parent),
    )
    assert ended.code == 2
    assert "train.max_stepps" in ended.err


def test_problems_of_the_second_pass_come_in_the_order_of_lines(untouched: Path) -> None:
    recipe = RECIPE.replace("name: toy\n", "name: toy\n\n\n\n\n\n").replace("in_features", "in_featuress")
    recipe = recipe.replace("nproc_per_node: 2", "nproc_per_node: 3").replace("Squares}", "Squares, of: 3}")
    (untouched.parent / "order.yaml").write_text(recipe)
    ended = launch(untouched, str(untouched.parent / "order.yaml"), "batch.global_batch_size=6")
    lines = [int(place[1]) for place in re.finditer(r"order\.yaml:(\d+):", ended.err)]
    assert ended.code == 2 and lines == sorted(lines) and lines[0] < 10 <= lines[-1], ended.err
