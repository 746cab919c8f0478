"""The tape of a checkpointed block: the statistics of its first pass, played back when it is recomputed.

Recomputing a BatchNorm must neither communicate (the other ranks may not be there) nor count the batch twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardkit.errors import WindowError
from shardkit.normalization.moments import Moments

_CURRENT: ContextVar[Tape | None] = ContextVar("tape", default=None)


class Tape:
    """Statistics by layer, in the order of its calls: a layer that is called twice has two entries."""

    def __init__(self) -> None:
        self._entries: dict[int, list[Moments]] = {}
        self._played: dict[int, int] | None = None

    @staticmethod
    def current() -> Tape | None:
        """The tape that records or plays in this context."""
        return _CURRENT.get()

    def record(self, layer: Any, moments: Moments) -> None:
        self._entries.setdefault(id(layer), []).append(moments)

    def replay(self, layer: Any) -> Moments | None:
        """The next entry of `layer`, or None while recording.

        Raises:
            WindowError: the recomputation calls a layer more often than the first pass did.
        """
        if self._played is None:
            return None
        index = self._played.get(id(layer), 0)
        entries = self._entries.get(id(layer), [])
        if index >= len(entries):
            raise WindowError(
                "a block called a BatchNorm in its recomputation that it did not call in its first pass; blocks under "
                "normalization.policy=exact must take the same way both times: list others under exact.blocks"
            )
        self._played[id(layer)] = index + 1
        return entries[index]

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._as_current():
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """From the first entry on; a block may be recomputed more than once."""
        self._played = {}
        try:
            with self._as_current():
                yield
        finally:
            self._played = None

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
