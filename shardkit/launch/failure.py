"""Why a run ended: what a rank leaves behind when it fails, and which of several failures is the cause.

When one rank fails, its peers fail of it. The cause is the earliest failure that is not such a consequence.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.errors import NonFiniteError, ShardkitError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# What a rank says when a peer has gone or is silent: gloo's words, then NCCL's.
_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|Socket (?:unexpectedly )?closed \[|Pair is not connected"
    r"|NCCL communicator was aborted|remote process exited"
)
_SILENT = re.compile(
    r"Timed out waiting|Application timeout caused pair closure|Socket Timeout|Watchdog caught collective"
)
# In a rank's log, before an abort.
_WHAT = re.compile(r"^\s*what\(\):\s*(.+)$", re.MULTILINE)
_TAIL = 2**18
# Bytes of a log in which it stands.
# What torch says on any device, and what systems say.
_SHORT = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|not enough memory", re.IGNORECASE)


class Kind(IntEnum):
    """How likely a failure is the cause, the likeliest first."""

    RAISED = 0
    KILLED = 1
    EXITED = 2
    CONSEQUENCE = 3
    ENDED = 4  # by the agent, because another rank had failed


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
    own: str = ""
    # The message of an error of shardkit's own.
    alike: bool = False
    # Every rank raises this error, whoever is the cause.
    killed: bool = False
    # By SIGKILL: with kind ENDED, it did not even answer the agent's SIGTERM.
    silent: bool = False
    # It waited for its peers until its timeout.
    shortage: bool = False
    # Memory ran out, as far as one can tell.
    memory: int | None = None
    # Bytes of its device; None = it shares the machine's.


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's on any device, Python's, or the system's."""
    says = isinstance(error, RuntimeError | OSError) and _SHORT.search(str(error))
    return isinstance(error, MemoryError) or bool(says)


def memory_here() -> int | None:
    """Bytes of this rank's CUDA device; None = it has none, and shares the machine's memory."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


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
                "alike": isinstance(error, NonFiniteError),
                "shortage": is_shortage(error),
                "memory": memory_here() if is_shortage(error) else None,
            },
        }
    }


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that a peer has gone or is silent."""
    return not isinstance(error, ShardkitError) and _is_consequence(str(error))


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure the others follow from; among equals the one that the agent saw first."""
    cause = min(failures, key=lambda failure: (failure.kind, failure.time))
    raised_by = [failure.rank for failure in failures if cause.own and failure.own == cause.own]
    if cause.alike or len(raised_by) > 1:
        return replace(cause, summary=f"training failed: {cause.own}")
    return cause


def failures_of(error: ChildFailedError, sent: Collection[tuple[int, int]] = ()) -> list[Failure]:
    """The failed ranks of an elastic run, in the order the agent saw them.

    Args:
        error: what the agent raised.
        sent: (process id, signal) of the kills by the agent itself.
    """
    return [_failure(rank, process, sent) for rank, process in error.failures.items()]


def report(failures: Sequence[Failure], logs: Path) -> str:
    """The error a user reads: the cause once, its traceback, and where the rest is."""
    cause = root_cause(failures)
    lines = [f"shardkit: {cause.summary}"]
    if cause.traceback:
        lines.append(cause.traceback.rstrip())
    said = _last_words(logs / f"rank-{cause.rank}.log") if cause.kind is Kind.KILLED else ""
    if said:
        lines.append(f"shardkit: its last words: {said}")
    ended = [failure for failure in failures if failure.kind is Kind.ENDED]
    silent = sorted(failure.rank for failure in [each for each in ended if each.killed] or ended)
    if cause.kind is Kind.CONSEQUENCE and silent:
        names = ", ".join(str(rank) for rank in silent)
        lines.append(f"shardkit: rank {names} did not answer; its log may say why: {logs / f'rank-{silent[0]}.log'}")
    elif cause.silent and all(failure.silent for failure in failures) and len(failures) > 1:
        lines.append(
            "shardkit: all ranks waited, each in another collective: they went different ways, as where a forward "
            "leaves out a layer on one rank whose parameters are sharded; their logs show where each one was"
        )
    lines.append(f"shardkit: log of rank {cause.rank}: {logs / f'rank-{cause.rank}.log'}")
    return "\n".join(lines)


def _last_words(log: Path) -> str:
    """What C++ says of the exception that it ends a process for; gloo says there that ranks are at odds."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return next(reversed(_WHAT.findall(text)), "")


def _failure(rank: int, process: ProcessFailure, sent: Collection[tuple[int, int]]) -> Failure:
    message = process.message
    if isinstance(message, dict):
        return _raised(rank, message)
    if process.exitcode < 0:
        name = _signal_name(-process.exitcode)
        hint = "; out of memory is the usual reason (see dmesg), a smaller batch.micro_batch_size needs less"
        return Failure(
            rank=rank,
            kind=Kind.ENDED if (process.pid, -process.exitcode) in sent else Kind.KILLED,
            time=process.timestamp,
            summary=f"rank {rank} was killed by {name}" + (hint if name == "SIGKILL" else ""),
            killed=name == "SIGKILL",
            shortage=name == "SIGKILL",
        )
    return Failure(
        rank=rank,
        kind=Kind.EXITED,
        time=process.timestamp,
        summary=f"rank {rank} exited with code {process.exitcode} and left no error",
    )


def _raised(rank: int, message: dict[str, Any]) -> Failure:
    extra = message.get("extraInfo", {})
    ours = bool(extra.get("ours"))
    text = str(message.get("message", ""))
    consequence = not ours and _is_consequence(text)
    silent = consequence and bool(_SILENT.search(text))
    what = "timed out waiting for its peers" if silent else "failed"
    return Failure(
        rank=rank,
        kind=Kind.CONSEQUENCE if consequence else Kind.RAISED,
        time=float(extra.get("time") or extra.get("timestamp") or 0.0),
        summary=f"rank {rank} {what}: {text}",
        traceback="" if ours else str(extra.get("py_callstack", "")),
        own=text if ours else "",
        alike=bool(extra.get("alike")),
        silent=silent,
        shortage=bool(extra.get("shortage")),
        memory=extra.get("memory"),
    )


def _is_consequence(text: str) -> bool:
    return bool(_GONE.search(text) or _SILENT.search(text))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
