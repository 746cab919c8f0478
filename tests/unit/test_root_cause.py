"""Among the ranks that failed, the one that the others failed of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardkit.errors import NonFiniteError, WindowError
from shardkit.launch import failure

PEER = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:35249")
SILENT = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete")
ENDED, ENDED_AT_LAST = "ended by the agent's SIGTERM", "ended by its SIGKILL"
SIGNALS = {ENDED: 15, ENDED_AT_LAST: 9}
End = BaseException | int | str


def process(folder: Path, rank: int, end: End) -> ProcessFailure:
    """A rank that raised an error, ended with an exit code, or was ended by the agent."""
    file = folder / f"{rank}.json"
    if isinstance(end, BaseException):
        file.write_text(json.dumps(failure.record_of(end)))
    code = end if isinstance(end, int) else -SIGNALS.get(str(end), -1)
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=code, error_file=str(file))


def failures(folder: Path, ends: Sequence[End]) -> list[failure.Failure]:
    """How the ranks of a run ended, seen in the order of their numbers."""
    error = ChildFailedError("worker", {rank: process(folder, rank, end) for rank, end in enumerate(ends)})
    return failure.failures_of(error, {(1000 + r, SIGNALS[str(e)]) for r, e in enumerate(ends) if str(e) in SIGNALS})


@pytest.mark.parametrize(
    ("ends", "rank", "words"),
    [
        ([PEER, ValueError("boom")], 1, "rank 1 failed: ValueError: boom"),
        ([ValueError("first"), ValueError("second")], 0, "rank 0 failed: ValueError: first"),
        ([PEER, -9], 1, "rank 1 was killed by SIGKILL"),
        ([ENDED, -11], 1, "rank 1 was killed by SIGSEGV"),
        ([ENDED, 7], 1, "rank 1 exited with code 7"),
        ([-6, ValueError("boom")], 1, "rank 1 failed: ValueError: boom"),
        ([ENDED, PEER], 1, "rank 1 failed: RuntimeError"),
        # Killed from elsewhere, and by the agent: the same exit codes.
        ([ENDED, -15], 1, "rank 1 was killed by SIGTERM"),
        ([PEER, -15, ENDED], 1, "rank 1 was killed by SIGTERM"),
        ([SILENT, ENDED_AT_LAST], 0, "rank 0 timed out waiting for its peers: RuntimeError"),
        # All ranks raise it; none of them need be the cause.
        ([NonFiniteError("step 3: nan on rank 0"), ENDED], 0, "training failed: step 3: nan on rank 0"),
        ([WindowError("too small"), WindowError("too small")], 0, "training failed: too small"),
        ([WindowError("too small"), ENDED], 0, "rank 0 failed: too small"),
    ],
)
def test_the_cause_is_the_failure_that_is_no_consequence(
    tmp_path: Path, ends: list[End], rank: int, words: str
) -> None:
    cause = failure.root_cause(failures(tmp_path, ends))
    assert cause.rank == rank
    assert cause.summary.startswith(words)


def test_an_error_of_shardkit_shows_its_message_only(tmp_path: Path) -> None:
    report = failure.report(failures(tmp_path, [NonFiniteError("step 3: the loss is nan")]), tmp_path)
    assert "shardkit: training failed: step 3: the loss is nan\n" in report
    assert "Traceback" not in report and str(tmp_path / "rank-0.log") in report


def test_a_rank_that_the_agent_had_to_kill_did_not_answer_and_is_not_out_of_memory(tmp_path: Path) -> None:
    report = failure.report(failures(tmp_path, [SILENT, ENDED_AT_LAST, ENDED]), tmp_path)
    assert "rank 1 did not answer" in report and str(tmp_path / "rank-1.log") in report
    assert "memory" not in report and "rank 2" not in report and "all ranks waited" not in report


def test_ranks_that_wait_in_different_collectives_are_told_as_that(tmp_path: Path) -> None:
    report = failure.report(failures(tmp_path, [SILENT, SILENT]), tmp_path)
    assert "all ranks waited, each in another collective" in report
    assert "all ranks waited" not in failure.report(failures(tmp_path, [SILENT, PEER]), tmp_path)


def test_the_last_words_of_a_rank_that_aborts_are_told(tmp_path: Path) -> None:
    said = "op.preamble.length <= op.nbytes. 20 vs 6. Is there a distributed collective mismatch in your code?"
    (tmp_path / "rank-1.log").write_text(f"terminate called after throwing\n  what():  {said}\nAborted\n")
    report = failure.report(failures(tmp_path, [PEER, -6]), tmp_path)
    assert f"shardkit: rank 1 was killed by SIGABRT\nshardkit: its last words: {said}\n" in report
    # Of a rank without a log, and without such words, nothing is told.
    (tmp_path / "rank-1.log").write_text("step 1\n")
    for rank in (0, 1):
        ends: list[End] = [PEER, PEER]
        ends[rank] = -6
        assert "last words" not in failure.report(failures(tmp_path, ends), tmp_path)
