"""The outermost call of a rank: whatever ends it early is recorded for the agent, logged, and shown once."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from shardkit.errors import ShardkitError
from shardkit.launch import failure

log = logging.getLogger(__name__)

_SECONDS_TO_LEAVE = 10.0


def guarded(body: Callable[[], int], *, tell: int | None = None) -> int:
    """The exit code of `body`, or 1 for the error that ended it, whatever its class: ranks were started.

    Args:
        body: returns an exit code.
        tell: a file descriptor to also print the error to, where no agent does.
    """
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class Recorder(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            path = self._get_error_file_path()
            if path:
                _record(Path(path), _trimmed(e))

    try:
        return record(lambda: _complete(body), Recorder())() or 0
    except Exception as error:
        # The terminal gets it from the agent, which knows whether another rank was first.
        log.error("this rank failed", exc_info=_trimmed(error), extra={"terminal": False})
        if tell is not None:
            os.write(tell, _told(error).encode())
        _leave_in_time(1)
        return 1


def _record(path: Path, error: BaseException) -> None:
    """Leave the error for the agent, whole or not at all: it cannot go on with half a file."""
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(failure.record_of(error)), encoding="utf-8")
        part.replace(path)
    except OSError as failed:
        log.error("this rank's error could not be left for the agent: %s", failed)


def _complete(body: Callable[[], int]) -> int:
    """`body`, which may not end the process by itself: its peers would be blamed for what follows."""
    try:
        return body()
    except SystemExit as error:
        text = f"sys.exit({error.code!r}) was called before the run was complete"
        raise RuntimeError(text).with_traceback(error.__traceback__) from None


def _trimmed(error: BaseException) -> BaseException:
    """`error` without the frames above the body: they are the same for every failure."""
    frame = top = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code is _complete.__code__:
            top = frame.tb_next
        frame = frame.tb_next
    return error.with_traceback(top)


def _told(error: Exception) -> str:
    """The error as a rank shows it; what a peer's end leads to needs no traceback."""
    if isinstance(error, ShardkitError):
        return f"shardkit: {error}\n"
    if failure.is_consequence(error):
        return f"shardkit: a peer has gone: {error}\n"
    return "".join(traceback.format_exception(error))


def _leave_in_time(code: int) -> None:
    """End the process even if something in it, like a collective's thread, does not want to."""
    sys.stdout.flush()
    sys.stderr.flush()
    timer = threading.Timer(_SECONDS_TO_LEAVE, os._exit, [code])
    timer.daemon = True
    timer.start()
