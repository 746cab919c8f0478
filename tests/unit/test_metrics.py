"""metrics.jsonl stays readable whatever happens to the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit import metrics


def test_a_number_that_is_not_finite_is_null() -> None:
    line = json.loads(metrics.encode({"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1}))
    assert line == {"loss": None, "grad_norm": None, "lr": 0.1}


def test_a_number_keeps_all_its_digits() -> None:
    value = 0.1 + 0.2
    assert json.loads(metrics.encode({"loss": value}))["loss"] == value


def test_a_line_is_there_when_write_returns(tmp_path: Path) -> None:
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"kind": "train", "step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"kind": "train", "step": 1}\n'
    file.close()


def test_an_end_is_added_once_and_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 3}\n{"kind": "tra')
    metrics.end(path, status="failed", error="rank 1 failed")
    metrics.end(path, status="failed", error="again")
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1]) == {"kind": "end", "status": "failed", "steps": 3, "error": "rank 1 failed"}


def test_a_run_that_ends_before_its_first_line_says_so_too(tmp_path: Path) -> None:
    metrics.end(tmp_path / "metrics.jsonl", status="failed", error="early")
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"kind": "end", "status": "failed", "steps": 0, "error": "early"}
    metrics.end(tmp_path / "none" / "metrics.jsonl", status="stopped", error="before there was a run folder")
    assert not (tmp_path / "none").exists()


def test_metrics_on_a_full_disk_say_so_once() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    file = metrics.MetricsFile(full)
    with pytest.raises(OSError, match="No space left"):
        file.write({"kind": "train"})
    file.close()
