"""The tape of a checkpointed block: the statistics of its first pass, played back when it is recomputed.

Recomputing a BatchNorm must neither communicate (the other ranks may not be there) nor count the batch twice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

from shardkit.errors import WindowError
from shardkit.normalization.moments import Moments

_CURRENT: ContextVar[Tape | None] = ContextVar("tape", default=None)

# What a layer normalised by, and whether its input was part of that.
Entry = tuple[Moments, bool]


class Tape:
    """Statistics by layer, in the order of its calls: a layer that is called twice has two entries."""

    def __init__(self) -> None:
        self._entries: dict[int, list[Entry]] = {}
        self._played: dict[int, int] | None = None
        self._outer: Tape | None = None

    @staticmethod
    def current() -> Tape | None:
        """The tape that records or plays in this context."""
        return _CURRENT.get()

    def record(self, layer: Any, moments: Moments, counts: bool = True) -> None:
        """Note what a call of `layer` normalised by, also for the block around this one."""
        self._entries.setdefault(id(layer), []).append((moments, counts))
        if self._outer is not None:
            self._outer.record(layer, moments, counts)

    def replay(self, layer: Any) -> Entry | None:
        """The next entry of `layer`, or None in a first pass.

        Raises:
            WindowError: the recomputation calls a layer more often than the first pass did.
        """
        if self._played is None:
            # A block inside one that is being recomputed makes its own first pass again.
            entry = self._outer.replay(layer) if self._outer is not None else None
            if entry is not None:
                self._entries.setdefault(id(layer), []).append(entry)
            return entry
        index = self._played.get(id(layer), 0)
        entries = self._entries.get(id(layer), [])
        if index >= len(entries):
            raise WindowError(
                "a block called a BatchNorm in its recomputation that it did not call in its first pass; a block that "
                "is recomputed must take the same way both times: list others under blocks, where "
                "activation_checkpointing asks for it, or under normalization.exact.blocks"
            )
        self._played[id(layer)] = index + 1
        return entries[index]

    def recording(self) -> AbstractContextManager[None]:
        """The first pass."""
        return _Current(self, plays=False)

    def replaying(self) -> AbstractContextManager[None]:
        """A recomputation, from the first entry on; can be entered again, as a block may be recomputed twice."""
        return _Current(self, plays=True)


class _Current(AbstractContextManager[None]):
    """Makes a tape the current one. torch's checkpoint enters one such context in every recomputation."""

    def __init__(self, tape: Tape, *, plays: bool) -> None:
        self._tape, self._plays = tape, plays
        self._tokens: list[Token[Tape | None]] = []

    def __enter__(self) -> None:
        if self._plays:
            self._tape._played = {}
        else:
            self._tape._outer = Tape.current()
        self._tokens.append(_CURRENT.set(self._tape))

    def __exit__(self, *error: object) -> None:
        _CURRENT.reset(self._tokens.pop())
        self._tape._played, self._tape._outer = None, None
