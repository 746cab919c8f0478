from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.jobs import metrics_lines, status


def write(folder: Path, *lines: dict[str, Any], rest: str = "") -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def test_a_run_that_has_not_begun_has_no_lines(tmp_path: Path) -> None:
    assert metrics_lines(tmp_path) == [] and status(tmp_path) == ""


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "train", "step": 1}, rest='{"kind": "tr')
    assert metrics_lines(tmp_path) == [{"kind": "train", "step": 1}] and status(tmp_path) == ""


@pytest.mark.parametrize(
    "end, expected",
    [
        ({"status": "completed"}, "completed"),
        ({"status": "stopped", "resumable": True}, "completed"),
        ({"status": "stopped"}, "stopped"),
        ({"status": "failed", "error": "no memory"}, "failed"),
    ],
)
def test_how_a_run_has_ended(tmp_path: Path, end: dict[str, Any], expected: str) -> None:
    write(tmp_path, {"kind": "train", "step": 1}, {"kind": "end", **end})
    assert status(tmp_path) == expected
