"""How a run stops before its end: what a signal does to the launcher, and the code of one that can be resumed.

The launcher needs it before its imports, so nothing here takes time to import.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

# The exit code of a run that stopped early on request, with a complete checkpoint: start it again to go on.
RESUMABLE = 75

Handler = Callable[[int, FrameType | None], NoReturn]


def install(handler: Handler) -> None:
    """Let `handler` answer the signals that end a run."""
    for each in _signals():
        signal.signal(each, handler)


def ignore() -> None:
    """Let nothing answer them: a second Ctrl-C in the middle of the teardown would leave ranks behind."""
    for each in _signals():
        signal.signal(each, signal.SIG_IGN)


def at_once(number: int, _frame: FrameType | None) -> NoReturn:
    """End this process where there are no ranks to stop yet, with one line."""
    leave(number)


def quietly(number: int, _frame: FrameType | None) -> NoReturn:
    """The same in a process beside others that say it."""
    os._exit(128 + number)


def leave(number: int, more: str = "") -> NoReturn:
    """Say what stopped this process and end it; an exception may be swallowed by an import it comes up in."""
    ignore()
    tell(f"shardkit: stopped by {signal.Signals(number).name}{more}")
    os._exit(128 + number)


def tell(text: str) -> None:
    """Print to a terminal that may have gone, as when it was the cause of a SIGHUP."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _signals() -> list[signal.Signals]:
    """The signals that end a run, without those ignored already (by nohup, or in a shell's background job)."""
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN]
