"""A run of two ranks from its launch to its end, and another beside it in the same folder."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest

from tests.system.launches import Ended, finish, metrics, start

RUN = "runs/first"


@pytest.fixture(scope="module")
def both(project: Path) -> tuple[Ended, Ended]:
    """Two launches at once, the first with its output in pipes."""
    begun = time.monotonic()
    first = start(project, "toy.yaml", f"run_dir={RUN}", "metrics.tensorboard=true")
    second = start(project, "toy.yaml", "train.max_steps=3")
    return finish(first, begun), finish(second, begun)


@pytest.fixture(scope="module")
def run(project: Path, both: tuple[Ended, Ended]) -> Path:
    assert both[0].code == 0, both[0].err
    return project / RUN


def test_two_launches_at_once_both_complete(both: tuple[Ended, Ended], project: Path) -> None:
    assert [ended.code for ended in both] == [0, 0], both[1].err
    (other,) = (project / "runs" / "toy").iterdir()
    assert metrics(other)[-1]["status"] == "completed"


def test_the_run_folder_holds_recipe_environment_metrics_and_logs(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names == {"recipe.yaml", "environment.json", "metrics.jsonl", "normalization.txt", "logs", "tensorboard"}
    assert {path.name for path in (run / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    facts = json.loads((run / "environment.json").read_text())
    assert facts["world_size"] == 2 and facts["device_type"] == "cpu"
    assert facts["packages"]["torch"] and "shardkit.launch toy.yaml" in facts["command"]


def test_training_lines_count_optimizer_steps(run: Path) -> None:
    lines = [line for line in metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["epoch"] for line in lines] == [0, 0, 0, 1, 1, 1, 2]
    # 20 items in windows of 8: the last of an epoch is short.
    assert [line["items"] for line in lines] == [8, 8, 4, 8, 8, 4, 8]
    assert [line["lr"] for line in lines] == pytest.approx([0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125, 0.00625])
    for line in lines:
        assert set(line) == {
            *("kind", "step", "epoch", "loss", "grad_norm", "lr", "items", "seconds"),
            *("items_per_second", "memory_bytes", "skipped"),
        }
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0 and line["seconds"] > 0
        assert line["memory_bytes"] > 2**20 and line["skipped"] is False


def test_evaluations_are_exact_over_the_data_set(run: Path) -> None:
    lines = [line for line in metrics(run) if line["kind"] == "eval"]
    assert [line["step"] for line in lines] == [4, 7]
    for line in lines:
        # 7 items on 2 ranks in forwards of 2: one rank runs a filler, which does not count.
        assert line["items"] == 7
        assert line["twos"] == 2.0
    assert lines[1]["loss"] < lines[0]["loss"]


def test_the_last_line_says_how_it_ended(run: Path) -> None:
    last = metrics(run)[-1]
    assert last["kind"] == "end" and last["status"] == "completed" and last["steps"] == 7 and last["seconds"] > 0


def test_the_same_recipe_gives_the_same_curve(run: Path, project: Path) -> None:
    (other,) = (project / "runs" / "toy").iterdir()
    mine, theirs = ([line["loss"] for line in metrics(folder) if line["kind"] == "train"] for folder in (run, other))
    assert mine[:3] == theirs


def test_piped_output_has_lines_and_no_control_characters(both: tuple[Ended, Ended]) -> None:
    text = both[0].out + both[0].err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    assert "step 7/7: loss" in text and "step 7/7: eval loss" in text


def test_the_output_is_rank_0s_and_the_other_ranks_is_in_its_log(both: tuple[Ended, Ended], run: Path) -> None:
    assert "printed by rank 0 of 2" in both[0].out
    assert "printed by rank 1" not in both[0].out + both[0].err
    assert "printed by rank 1 of 2" in (run / "logs" / "rank-1.log").read_text()
    assert "step 7/7: loss" in (run / "logs" / "rank-0.log").read_text()


def test_threads_are_set_and_said_once(both: tuple[Ended, Ended], run: Path) -> None:
    assert both[0].err.count("OMP_NUM_THREADS") == 1
    threads = re.search(r"OMP_NUM_THREADS=(\d+)", both[0].err)
    assert threads and json.loads((run / "environment.json").read_text())["threads_per_rank"] == int(threads[1])


def test_one_closing_summary_is_shown(both: tuple[Ended, Ended]) -> None:
    (line,) = [line for line in both[0].err.splitlines() if "completed" in line]
    assert "7 steps" in line and "eval loss" in line and RUN in line


def test_libraries_keep_quiet_on_the_terminal(both: tuple[Ended, Ended]) -> None:
    ours = re.compile(r"shardkit: |step \d+/7: |printed by rank 0")
    strange = [line for line in (both[0].out + both[0].err).splitlines() if not ours.match(line)]
    assert strange == []
