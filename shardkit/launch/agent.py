"""The elastic agent of this machine: torch's own, in this process; shardkit asks it and reads its outcome."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from shardkit import metrics
from shardkit.errors import RequestError
from shardkit.launch import failure, shortage, stopping
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
    """Run the ranks of `folder` to their end; the exit code of the launcher.

    Raises:
        RequestError: there is no place for the agent's own files; nothing was started.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as run_elastic

    caught = signal.SIGTERM

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal caught
        stopping.ignore()
        caught = signal.Signals(number)
        # The ranks get a SIGTERM whatever it was: at a SIGINT one that still imports shows a KeyboardInterrupt.
        raise SignalException(f"signal {number}", signal.SIGTERM)

    scratch = _scratch()
    sent = _signals_sent()
    # The agent tells of a failure in many lines of its own; the report says it once.
    logging.disable(logging.CRITICAL)
    stopping.install(stop)
    try:
        run_elastic(parse_args(_arguments(folder, nproc, scratch)))
    except ChildFailedError as error:
        return _failed(folder, failure.failures_of(error, sent), nproc)
    except SignalException:
        return _stopped(folder, caught)
    except RendezvousError as error:
        return _lost(folder, f"the ranks did not meet: {error}", RENDEZVOUS_FAILED)
    except (OSError, ValueError, KeyError) as error:
        # ValueError and KeyError: an error file that is no error file.
        return _lost(folder, f"the ranks could not be watched to their end: {type(error).__name__}: {error}", 1)
    finally:
        # Python gives signals back to the kernel as it exits; an ignored one stays ignored, and the code stays ours.
        stopping.ignore()
        logging.disable(logging.NOTSET)
        shutil.rmtree(scratch, ignore_errors=True)
    return _ended_well(folder)


def stop_without_ranks(folder: RunFolder) -> stopping.Handler:
    """What a signal does between the making of the run folder and the start of its ranks."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        _write_end(folder, status="stopped", error=f"stopped by {signal.Signals(number).name}")
        stopping.leave(number, f"; run folder {folder.path}")

    return stop


def _scratch() -> str:
    """A folder for the ranks' error files, on another disk than the one that a run may fill."""
    try:
        return tempfile.mkdtemp(prefix="shardkit-")
    except OSError as error:
        raise RequestError(
            f"no temporary folder can be made: {error.strerror or error}; TMPDIR names another"
        ) from error


def _signals_sent() -> set[tuple[int, int]]:
    """(process group, signal) of each kill by this process from now on: torch does not say whom it ended itself."""
    sent: set[tuple[int, int]] = set()

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.killpg":
            group, number = arguments
            sent.add((int(str(group)), int(str(number))))

    sys.addaudithook(note)
    return sent


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


def _ended_well(folder: RunFolder) -> int:
    """The code of a run whose ranks all ended with 0, as they do too when they stop early on request.

    torch's agent takes any other code of a rank for a failure, so the run says it in its metrics.
    """
    try:
        return stopping.RESUMABLE if metrics.is_resumable(folder.metrics) else 0
    except OSError as error:
        stopping.tell(f"shardkit: cannot read {folder.metrics}: {error.strerror}")
        return 0


def _failed(folder: RunFolder, failures: list[failure.Failure], world_size: int) -> int:
    _show_cursor()
    cause = failure.root_cause(failures)
    stopping.tell(failure.report(failures, folder.logs))
    _write_end(folder, status="failed", error=cause.summary)
    if cause.shortage:
        try:
            stopping.tell(shortage.told(folder, cause, world_size))
        except Exception as error:  # whatever a model that cannot be built twice raises; the run has failed already
            stopping.tell(f"shardkit: it could not be planned: {type(error).__name__}: {error}")
    return 1


def _stopped(folder: RunFolder, number: signal.Signals) -> int:
    _show_cursor()
    stopping.tell(f"shardkit: stopped by {number.name}; run folder {folder.path}")
    _write_end(folder, status="stopped", error=f"stopped by {number.name}")
    return 128 + number


def _lost(folder: RunFolder, text: str, code: int) -> int:
    """The end of a run whose agent could not do its work."""
    _show_cursor()
    stopping.tell(f"shardkit: {text}\nshardkit: logs of the ranks: {folder.logs}")
    _write_end(folder, status="failed", error=text)
    return code


def _write_end(folder: RunFolder, *, status: str, error: str) -> None:
    try:
        metrics.end(folder.metrics, status=status, error=error)
    except OSError as failed:
        stopping.tell(f"shardkit: cannot write to {folder.metrics}: {failed.strerror}")


def _show_cursor() -> None:
    """A rank that was killed has not given the cursor back."""
    if sys.stderr.isatty():
        stopping.tell(_SHOW_CURSOR)
