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


def kinds(path: Path) -> list[tuple[str, int | None]]:
    return [(line["kind"], line.get("step")) for line in map(json.loads, path.read_text().splitlines())]


def test_a_resumed_run_forgets_the_steps_that_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = '{"kind": "train", "step": 1, "loss": 0.30000000000000004}\n{"kind":"eval","step":2}\n'
    path.write_text(
        kept + '{"kind": "train", "step": 3}\n{"kind": "end", "status": "failed", "steps": 3}\n{"kind": "tra'
    )
    metrics.resume(path, 2, backend="zero3", world_size=4, checkpoint="step-00000002")
    assert path.read_text().startswith(kept)
    (line,) = path.read_text().removeprefix(kept).splitlines()
    assert json.loads(line) == {
        "kind": "resume",
        "step": 2,
        "backend": "zero3",
        "world_size": 4,
        "checkpoint": "step-00000002",
    }
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_resumed_again_keeps_the_earlier_resumes_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 4):
        metrics.resume(path, step)
    metrics.resume(path, 2)
    assert kinds(path) == [("resume", 1), ("resume", 2), ("resume", 2)]


def test_a_line_cut_off_at_its_end_alone_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}')
    metrics.resume(path, 5)
    assert kinds(path) == [("train", 1), ("train", 2), ("resume", 5)]


def test_a_resume_that_fails_leaves_the_lines_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n')

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        metrics.resume(path, 0)
    assert kinds(path) == [("train", 1)]


def test_a_run_that_goes_on_has_not_ended_yet(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics.reopen(path)
    assert not path.exists()
    path.write_text('{"kind": "train", "step": 3}\n')
    metrics.end(path, status="stopped", error="stopped by SIGTERM")
    metrics.reopen(path)
    metrics.end(path, status="failed", error="rank 1 failed")
    assert kinds(path) == [("train", 3), ("end", None), ("reopen", None), ("end", None)]
    assert json.loads(path.read_text().splitlines()[-1])["steps"] == 3


@pytest.mark.parametrize(
    ("line", "resumable"),
    [
        ('{"kind": "end", "status": "stopped", "steps": 5, "resumable": true}\n', True),
        ('{"kind": "end", "status": "stopped", "steps": 5, "error": "stopped by SIGTERM"}\n', False),
        ('{"kind": "end", "status": "completed", "steps": 5}\n', False),
        ('{"kind": "reopen"}\n', False),
        ("", False),
    ],
)
def test_only_a_run_that_stopped_on_request_is_resumable(tmp_path: Path, line: str, resumable: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    assert not metrics.is_resumable(path)
    path.write_text('{"kind": "train", "step": 5}\n' + line)
    assert metrics.is_resumable(path) is resumable


def test_tensorboard_hides_the_steps_that_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_at, steps in [(None, (1, 2, 3)), (1, (2,))]:
        board = metrics.TensorBoard(tmp_path, resumed_at=resumed_at)
        for step in steps:
            board.write({"kind": "train", "step": step, "loss": float(step)})
        board.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2]


def test_metrics_on_a_full_disk_say_so_once() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    file = metrics.MetricsFile(full)
    with pytest.raises(OSError, match="No space left"):
        file.write({"kind": "train"})
    file.close()
