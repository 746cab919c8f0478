"""The process of one rank, before torch is imported: it ends with its agent, and its output has its place."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with(parent: int | None) -> None:
    """Be killed when the process that started this one ends, even when that one is killed itself.

    A rank is in a session of its own, so without this it would go on training for nobody.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # it ended before the request above


def default_signals() -> None:
    """Let a signal end this rank at once and without a traceback: whoever sends one knows why."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def take_output(log: Path, *, terminal: bool) -> None:
    """Rank 0 keeps the terminal and logs beside it; of other ranks everything goes to their log."""
    if terminal:
        log_to_terminal(log)
        faulthandler.enable()
        return
    redirect(log)
    log_to_output()


def redirect(log: Path) -> None:
    """Send all output of this process, that of libraries in C++ too, to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()


def log_to_terminal(log: Path) -> None:
    """Show what shardkit says, and what libraries say only from an error on; `log` gets all of it."""
    terminal = _Terminal()
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.addFilter(_shown)
    file = _File(log, encoding="utf-8")
    file.setFormatter(_FORMAT)
    _configure([terminal, file])


def log_to_output() -> None:
    """Let everything go to standard error, which is the rank's log."""
    handler = _Terminal()
    handler.setFormatter(_FORMAT)
    _configure([handler])


def quiet_libraries() -> None:
    """Let the loggers of the libraries imported so far warn, and do so where the root logger writes."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] != "shardkit":
            logger.setLevel(max(logger.getEffectiveLevel(), logging.WARNING))
            logger.handlers.clear()
            logger.propagate = True


class _Terminal(logging.StreamHandler):
    """Writes to what sys.stderr is at that moment: a progress bar puts itself in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


class _File(logging.FileHandler):
    """A log beside a terminal, which a line that a full disk does not take leaves as it is."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass  # logging would show a traceback for each such line; the run ends at its next line of metrics


_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


def _configure(handlers: list[logging.Handler]) -> None:
    logging.basicConfig(handlers=handlers, level=logging.WARNING, force=True)
    logging.getLogger("shardkit").setLevel(logging.INFO)
    logging.captureWarnings(True)


def _shown(record: logging.LogRecord) -> bool:
    ours = record.name.partition(".")[0] == "shardkit"
    return getattr(record, "terminal", ours or record.levelno >= logging.ERROR)


def leave(code: int) -> NoReturn:
    """End this process after its exit functions, without tearing the interpreter and C++ down.

    A thread of gloo that asks for the GIL there aborts a rank that has finished its work (see `shardkit.world.join`).
    """
    atexit._run_exitfuncs()  # what sys.exit would call first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
