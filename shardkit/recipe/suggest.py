"""The nearest name to a mistyped one, as the end of a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `word` was most likely meant to be; 'bf61' may be short for 'bf16-mixed'."""

    def likeness(name: str) -> float:
        short = 0.9 * _ratio(word, name[: len(word)]) if len(word) > 3 else 0.0
        return max(_ratio(word, name), short)

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no name is near."""
    name = nearest(word, names)
    return f"; did you mean {name!r}?" if name else ""


def _ratio(word: str, name: str) -> float:
    return difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio()
