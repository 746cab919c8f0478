"""Why a model or an optimizer cannot be looked at without running it, in words."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from shardkit.errors import ShardkitError

OWN = (Path(__file__).parents[1], Path(torch.__file__).parent)
# A frame in one of these is not the user's.
READS = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")


def why(error: BaseException) -> str:
    """One sentence without a full stop; with the place in code that is neither torch's nor shardkit's."""
    if isinstance(error, ShardkitError):
        return str(error)
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    said = f"{kind}: {lines[0]}" if lines else kind
    if kind in READS:
        said = (
            "something depends on the values of a tensor, as .item() and `if` do, and a trace has only shapes "
            f"({said}); `--measure` runs it"
        )
    place = _place(error)
    return f"{place}: {said}" if place else said


def _place(error: BaseException) -> str:
    """file.py:12 of the innermost frame of the user's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_absolute() and path.exists() and not any(folder in path.parents for folder in OWN):
            return f"{path.name}:{frame.lineno}"
    return ""
