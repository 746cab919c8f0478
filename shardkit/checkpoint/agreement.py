"""Agreement: what fails on one rank fails on all, with the same message, before anything that needs all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardkit.errors import CheckpointError, ShardkitError
from shardkit.world import World

Result = TypeVar("Result")


def agreed(world: World, what: str, action: Callable[[], Result]) -> Result:
    """`action()` on every rank; this rank's result when it succeeded on all.

    `action` must not call a collective: a rank that failed before it would leave the others waiting.

    Raises:
        CheckpointError: on every rank, naming those on which `action` raised, and why.
    """
    result, failure, cause = None, "", None
    try:
        result = action()
    except Exception as error:
        failure, cause = described(error), error
    failures = [(rank, why) for rank, why in enumerate(world.gather(failure)) if why]
    if failures:
        raise CheckpointError(f"{what}: {told(failures, world.size)}") from cause
    return result  # pyright: ignore[reportReturnType]


def described(error: Exception) -> str:
    """An exception in one line."""
    if isinstance(error, ShardkitError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def told(failures: list[tuple[int, str]], size: int) -> str:
    """Each failure once, with the ranks it was met on."""
    ranks: dict[str, list[int]] = {}
    for rank, why in failures:
        ranks.setdefault(why, []).append(rank)
    if size == 1 or (len(ranks) == 1 and len(failures) == size):
        return "; ".join(ranks)
    return "; ".join(f"rank {', '.join(map(str, own))}: {why}" for why, own in ranks.items())
