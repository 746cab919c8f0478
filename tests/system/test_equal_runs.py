"""The shipped recipes on every backend, through the launcher: the same curves, and what each recipe promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
BACKENDS += ["accelerate-ddp", "accelerate-zero1", "accelerate-zero2", "accelerate-zero3"]
pytestmark = pytest.mark.slow

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(recipe, *overrides)`: the lines of metrics.jsonl; each run is made once."""
    kept: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def launch(*arguments: str) -> list[dict[str, Any]]:
        if arguments not in kept:
            folder = tmp_path_factory.mktemp("run") / "run"
            command = [sys.executable, "-m", "shardkit.launch", f"recipes/{arguments[0]}.yaml", *arguments[1:]]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [*command, f"run_dir={folder}"], cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment
            )
            assert done.returncode == 0, done.stderr[-3000:]
            kept[arguments] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return kept[arguments]

    return launch


def column(lines: list[dict[str, Any]], name: str, kind: str = "train") -> list[Any]:
    return [line[name] for line in lines if line["kind"] == kind]


def chars(run: Run, backend: str, processes: int, *more: str) -> list[dict[str, Any]]:
    return run("chars-gpt", f"backend={backend}", "train.max_steps=20", f"launch.nproc_per_node={processes}", *more)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_losses_and_norms_are_those_of_a_single_process(run: Run, backend: str, processes: int) -> None:
    want, got = chars(run, "single", 1), chars(run, backend, processes)
    # Measured: 5.3e-8 (loss) and 8.1e-6 (norm) at worst.
    assert len(column(got, "loss")) == 20
    assert column(got, "loss") == pytest.approx(column(want, "loss"), rel=2e-5)
    assert column(got, "grad_norm") == pytest.approx(column(want, "grad_norm"), rel=1e-4)
    assert column(got, "loss", "eval") == pytest.approx(column(want, "loss", "eval"), rel=2e-5)
    assert column(got, "items", "eval") == column(want, "items", "eval")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_losses_are_those_of_a_single_process(run: Run, backend: str) -> None:
    # That masters and optimizer state are fp32 is asserted in the conformance suite.
    want = chars(run, "single", 1, "train.precision=bf16-mixed")
    got = chars(run, backend, 2, "train.precision=bf16-mixed")
    assert column(got, "loss") == pytest.approx(column(want, "loss"), rel=2e-2)


@pytest.mark.parametrize("backend", ["single", *BACKENDS])
def test_a_model_no_one_here_wrote_runs_by_changing_one_word(run: Run, backend: str) -> None:
    got = run("hf-resnet", f"backend={backend}", "train.max_steps=5")
    assert got[-1]["status"] == "completed" and all(loss < 4 for loss in column(got, "loss"))


@pytest.mark.parametrize(
    ("backend", "processes", "micro_batch_size"),
    [(backend, *[(2, 4), (4, 16), (2, 16)][index % 3]) for index, backend in enumerate(BACKENDS)],
)
def test_exact_batch_norm_depends_on_neither_processes_nor_micro_batch(
    run: Run, backend: str, processes: int, micro_batch_size: int
) -> None:
    def digits(backend: str, processes: int, micro_batch_size: int) -> list[dict[str, Any]]:
        cut = [f"launch.nproc_per_node={processes}", f"batch.micro_batch_size={micro_batch_size}"]
        fixed = ["batch.global_batch_size=64", "normalization.policy=exact", "train.max_steps=20"]
        return run("digits-resnet", f"backend={backend}", *cut, *fixed)

    want, got = digits("single", 1, 64), digits(backend, processes, micro_batch_size)
    # Measured: 1.6e-7 at worst.
    assert column(got, "loss") == pytest.approx(column(want, "loss"), rel=2e-5)


def test_digits_reach_97_percent_in_two_minutes(run: Run) -> None:
    start = time.monotonic()
    got = run("digits-resnet")
    assert column(got, "accuracy", "eval")[-1] >= 0.97
    assert time.monotonic() - start < 120
    assert column(got, "items", "eval")[-1] == 360


def test_chars_fall_below_two(run: Run) -> None:
    got = run("chars-gpt")
    assert column(got, "loss", "eval")[-1] < 2.0
    assert sum(column(got, "loss")[-20:]) / 20 < 2.0
