"""The elastic agent of this machine: torch's own, in this process; shardkit asks it and reads its outcome."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from shardkit import metrics
from shardkit.launch import failure
from shardkit.run_folder import RunFolder

RENDEZVOUS_FAILED = 70
WORKER = "shardkit.train"
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Environment variables the ranks get from the launcher."""

    values: dict[str, str]
    note: str
    # One line about the number of threads; empty when the user has chosen it.


def environment(nproc: int, environ: dict[str, str]) -> RankEnvironment:
    """What is set for `nproc` ranks on this machine, where the user has not set it."""
    cpus = os.cpu_count() or 1
    values = {
        # Without it torch 2.13's restarts and late nodes read the store of the attempt before: pytorch#135712.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    note = ""
    if "OMP_NUM_THREADS" not in environ:
        threads = str(max(1, cpus // nproc))
        values["OMP_NUM_THREADS"] = threads
        note = f"OMP_NUM_THREADS={threads} ({cpus} CPUs for {nproc} rank{'s' if nproc > 1 else ''})"
    return RankEnvironment(values=values, note=note)


def torchrun_command(nproc: int, recipe: str, overrides: Sequence[str], values: dict[str, str]) -> str:
    """The command that starts the same run under torchrun."""
    assignments = [f"{name}={value}" for name, value in sorted(values.items())]
    flags = ["--standalone", f"--nproc-per-node={nproc}", "--max-restarts=0"]
    return shlex.join([*assignments, "torchrun", *flags, "-m", "shardkit.launch", recipe, *overrides])


def run(folder: RunFolder, nproc: int) -> int:
    """Run the ranks of `folder` to their end; the exit code of the launcher."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as run_elastic

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        # Once only: a second Ctrl-C in the middle of the teardown would leave ranks behind.
        _ignore_signals()
        raise SignalException(f"signal {number}", signal.Signals(number))

    scratch = folder.logs / ".elastic"
    # The agent tells of a failure in many lines of its own; the report says it once.
    logging.disable(logging.CRITICAL)
    install(stop)
    try:
        run_elastic(parse_args(_arguments(folder, nproc, str(scratch))))
    except ChildFailedError as error:
        return _failed(folder, failure.failures_of(error))
    except SignalException as error:
        return _stopped(folder, error.sigval)
    except RendezvousError as error:
        print(f"shardkit: the ranks did not meet: {error}", file=sys.stderr)
        return RENDEZVOUS_FAILED
    finally:
        # Python gives signals back to the kernel as it exits; an ignored one stays ignored, and the code stays ours.
        _ignore_signals()
        logging.disable(logging.NOTSET)
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def stop_quietly(number: int, _frame: FrameType | None) -> NoReturn:
    """What a signal does before there are ranks to stop."""
    raise SystemExit(128 + number)


def install(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    """Let `handler` answer the signals that end a run."""
    for each in _signals():
        signal.signal(each, handler)


def _arguments(folder: RunFolder, nproc: int, scratch: str) -> list[str]:
    return [
        "--standalone",
        "--nnodes=1",
        f"--nproc-per-node={nproc}",
        "--max-restarts=0",
        # INT, TERM and HUP are answered above, once.
        "--signals-to-handle=SIGQUIT",
        f"--log-dir={scratch}",
        "--module",
        WORKER,
        str(folder.path),
        f"--agent={os.getpid()}",
        # The rank on one machine; filled in by torch, and known before the rank imports it.
        "--rank=${local_rank}",
    ]


def _signals() -> list[signal.Signals]:
    """The signals that end a run, without those ignored already (by nohup, or in a shell's background job)."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN]


def _ignore_signals() -> None:
    for each in _signals():
        signal.signal(each, signal.SIG_IGN)


def _failed(folder: RunFolder, failures: list[failure.Failure]) -> int:
    cause = failure.root_cause(failures)
    _show_cursor()
    print(failure.report(failures, folder.logs), file=sys.stderr, flush=True)
    metrics.end(folder.metrics, status="failed", error=cause.summary)
    return cause.exit_code


def _stopped(folder: RunFolder, number: signal.Signals) -> int:
    _show_cursor()
    print(f"shardkit: stopped by {number.name}; run folder {folder.path}", file=sys.stderr, flush=True)
    metrics.end(folder.metrics, status="stopped", error=f"stopped by {number.name}")
    return 128 + number


def _show_cursor() -> None:
    """A rank that was killed has not given the cursor back."""
    if sys.stderr.isatty():
        print(_SHOW_CURSOR, file=sys.stderr)
