"""Why a run ended: what a rank leaves behind when it fails, and which of several failures is the cause.

When one rank fails, its peers fail of it. The cause is the earliest failure that is not such a consequence.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.errors import ShardkitError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# What a rank says when a peer has gone: gloo's words, then NCCL's.
_CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Timed out waiting"
    r"|Socket Timeout|NCCL communicator was aborted|remote process exited|Watchdog caught collective"
)


class Kind(IntEnum):
    """How likely a failure is the cause, the likeliest first."""

    RAISED = 0
    KILLED = 1
    EXITED = 2
    CONSEQUENCE = 3
    ENDED = 4  # by the agent's SIGTERM, because another rank failed


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of one rank."""

    rank: int
    kind: Kind
    time: float
    summary: str
    # One sentence: "rank 1 failed: RuntimeError: boom".
    traceback: str = ""
    # For the terminal; empty for shardkit's own errors, whose message says it all.
    exit_code: int = 1


def record_of(error: BaseException) -> dict[str, Any]:
    """What a failing rank writes for the agent: torch's error file, and what the report needs besides."""
    ours = isinstance(error, ShardkitError)
    now = time.time()
    return {
        "message": {
            "message": f"{error}" if ours else f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(now)),
                "time": now,
                "ours": ours,
                "exit_code": error.exit_code if isinstance(error, ShardkitError) else 1,
            },
        }
    }


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that a peer has gone."""
    return not isinstance(error, ShardkitError) and _CONSEQUENCE.search(str(error)) is not None


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The failure the others follow from."""
    return min(failures, key=lambda failure: (failure.kind, failure.time, failure.rank))


def failures_of(error: ChildFailedError) -> list[Failure]:
    """The failed ranks of an elastic run."""
    return [_failure(rank, process) for rank, process in error.failures.items()]


def report(failures: list[Failure], logs: Path) -> str:
    """The error a user reads: the cause once, its traceback, and where the rest is."""
    cause = root_cause(failures)
    lines = [f"shardkit: {cause.summary}"]
    if cause.traceback:
        lines.append(cause.traceback.rstrip())
    waiting = sorted(failure.rank for failure in failures if failure.kind is Kind.ENDED)
    if cause.kind is Kind.CONSEQUENCE and waiting:
        names = ", ".join(str(rank) for rank in waiting)
        lines.append(f"shardkit: still running and waited for: rank {names}; its log may say why")
    lines.append(f"shardkit: log of rank {cause.rank}: {logs / f'rank-{cause.rank}.log'}")
    return "\n".join(lines)


def _failure(rank: int, process: ProcessFailure) -> Failure:
    message = process.message
    if isinstance(message, dict):
        return _raised(rank, message)
    if process.exitcode < 0:
        name = _signal_name(-process.exitcode)
        hint = "; out of memory is the usual reason (see dmesg), a smaller batch.micro_batch_size needs less"
        return Failure(
            rank=rank,
            kind=Kind.ENDED if name == "SIGTERM" else Kind.KILLED,
            time=process.timestamp,
            summary=f"rank {rank} was killed by {name}" + (hint if name == "SIGKILL" else ""),
        )
    return Failure(
        rank=rank,
        kind=Kind.EXITED,
        time=process.timestamp,
        summary=f"rank {rank} exited with code {process.exitcode} and left no error",
    )


def _raised(rank: int, message: dict[str, Any]) -> Failure:
    extra = message.get("extraInfo", {})
    text = str(message.get("message", ""))
    consequence = not extra.get("ours") and _CONSEQUENCE.search(text)
    return Failure(
        rank=rank,
        kind=Kind.CONSEQUENCE if consequence else Kind.RAISED,
        time=float(extra.get("time") or extra.get("timestamp") or 0.0),
        summary=f"rank {rank} failed: {text}",
        traceback="" if extra.get("ours") else str(extra.get("py_callstack", "")),
        exit_code=int(extra.get("exit_code", 1)),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
