"""Among the ranks that failed, the one that the others failed of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardkit.errors import NonFiniteError
from shardkit.launch import failure

PEER = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:35249")


def process(folder: Path, rank: int, end: BaseException | int) -> ProcessFailure:
    """A rank that raised an error, or ended with an exit code."""
    file = folder / f"{rank}.json"
    if isinstance(end, BaseException):
        file.write_text(json.dumps(failure.record_of(end)))
    code = end if isinstance(end, int) else 1
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=code, error_file=str(file))


@pytest.mark.parametrize(
    ("ends", "rank", "words"),
    [
        ([PEER, ValueError("boom")], 1, "rank 1 failed: ValueError: boom"),
        ([ValueError("first"), ValueError("second")], 0, "rank 0 failed: ValueError: first"),
        ([PEER, -9], 1, "rank 1 was killed by SIGKILL"),
        ([-15, -11], 1, "rank 1 was killed by SIGSEGV"),
        ([-15, 7], 1, "rank 1 exited with code 7"),
        ([-6, ValueError("boom")], 1, "rank 1 failed: ValueError: boom"),
        ([-15, PEER], 1, "rank 1 failed: RuntimeError"),
    ],
)
def test_the_cause_is_the_failure_that_is_no_consequence(
    tmp_path: Path, ends: list[BaseException | int], rank: int, words: str
) -> None:
    error = ChildFailedError("worker", {r: process(tmp_path, r, end) for r, end in enumerate(ends)})
    cause = failure.root_cause(failure.failures_of(error))
    assert cause.rank == rank
    assert cause.summary.startswith(words)


def test_an_error_of_shardkit_shows_its_message_only(tmp_path: Path) -> None:
    error = ChildFailedError("worker", {0: process(tmp_path, 0, NonFiniteError("step 3: the loss is nan"))})
    report = failure.report(failure.failures_of(error), tmp_path)
    assert "rank 0 failed: step 3: the loss is nan" in report
    assert "Traceback" not in report and str(tmp_path / "rank-0.log") in report
