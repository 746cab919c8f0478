"""A run that stopped early on request ends its launcher with a code that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardkit import metrics
from shardkit.launch import agent, outer, stopping
from shardkit.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create("seed: 1\n")
    return made


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({"kind": "end", "status": "stopped", "steps": 5, "resumable": True}, 75),
        ({"kind": "end", "status": "completed", "steps": 5}, 0),
        (None, 0),
    ],
)
def test_the_launcher_reads_how_its_ranks_ended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, line: dict[str, object] | None, code: int
) -> None:
    def ranks(_: object) -> None:
        if line:
            file = metrics.MetricsFile(folder.metrics)
            file.write(line)
            file.close()

    assert launched(folder, monkeypatch, ranks) == code


def test_a_failure_after_a_stop_is_a_failure(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.metrics.write_text('{"kind": "end", "status": "stopped", "steps": 5, "resumable": true}\n')

    def ranks(_: object) -> None:
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="/none")
        raise ChildFailedError("shardkit.train", {0: failure})

    folder.reopen("seed: 1\n")
    assert launched(folder, monkeypatch, ranks) == 1
    assert not metrics.is_resumable(folder.metrics)


def test_an_earlier_stop_is_not_that_of_an_attempt_that_said_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.metrics.write_text('{"kind": "end", "status": "stopped", "steps": 5, "resumable": true}\n')
    folder.reopen("seed: 1\n")
    assert launched(folder, monkeypatch, lambda _: None) == 0


def test_srun_hands_the_code_on_and_torchrun_would_call_it_a_failure() -> None:
    assert (outer.code_of_stop("srun"), outer.code_of_stop("torchrun")) == (stopping.RESUMABLE, 0)


def launched(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, ranks: object) -> int:
    """The code of a launch whose ranks do as told; what it does to the signals of this process is left out."""
    monkeypatch.setattr("torch.distributed.run.run", ranks)
    for name in ("install", "ignore"):
        monkeypatch.setattr(stopping, name, lambda *_: None)
    return agent.run(folder, 2)
