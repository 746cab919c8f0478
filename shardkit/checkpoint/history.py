"""The history of a run: its checkpoints in order, the newest that can be used, and which are kept."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.manifest import Manifest
from shardkit.checkpoint.storage import MANIFEST, Storage
from shardkit.checkpoint.verification import Verify, open_verified
from shardkit.errors import CheckpointError
from shardkit.world import World

_STEP = re.compile(r"step-(\d+)")
SUPERSEDED = "superseded-"
# In front of the name of a checkpoint that a run left behind when it went on from an earlier one.


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint that can be used."""

    storage: Storage
    name: str
    manifest: Manifest
    broken: tuple[str, ...] = ()
    # Why newer ones cannot be.


def steps(storage: Storage) -> list[tuple[int, str]]:
    """(step, name) of the checkpoints in a folder, the oldest first; numbers are compared as numbers."""
    matches = [(match, name) for name in storage.names() if (match := _STEP.fullmatch(name))]
    return sorted((int(match.group(1)), name) for match, name in matches)


def newest(storage: Storage, world: World, how: Verify = "full") -> Found | None:
    """The newest checkpoint that verifies; None when there is none at all. A collective.

    Raises:
        CheckpointError: there are some, and none verifies.
    """
    names = [name for _, name in agreed_steps(storage, world)]
    broken: list[str] = []
    for name in reversed(names):
        try:
            manifest = open_verified(storage, name, world, how)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        return Found(storage=storage, name=name, manifest=manifest, broken=tuple(broken))
    if broken:
        raise CheckpointError(
            "no checkpoint can be used: " + "; ".join(broken) + ". Remove them to start anew, or name another one with "
            "checkpoint.resume=PATH"
        )
    return None


def agreed_steps(storage: Storage, world: World) -> list[tuple[int, str]]:
    """`steps` as rank 0 sees them, on every rank. A collective.

    Raises:
        CheckpointError: on all ranks: the folder cannot be read.
    """
    own = agreed(world, f"{storage.root} cannot be read", lambda: steps(storage) if world.rank == 0 else [])
    return world.gather(own)[0]


def is_checkpoint(storage: Storage, name: str = "") -> bool:
    """Whether the folder `name` has a manifest."""
    return MANIFEST in storage.names(name)


def supersede(storage: Storage, after: int, world: World) -> list[str]:
    """Set the checkpoints of steps after `after` aside: they are of a course that the run does not go on. A collective.

    Returns:
        Their names, on every rank.
    """

    def rename() -> list[str]:
        if world.rank != 0:
            return []
        names = [name for step, name in steps(storage) if step > after]
        for name in names:
            storage.remove(SUPERSEDED + name)
            storage.rename(name, SUPERSEDED + name)
        return names

    return world.gather(agreed(world, f"checkpoints in {storage.root} could not be set aside", rename))[0]


def retire(storage: Storage, *, keep_last: int | None, keep: Collection[str], world: World) -> list[str]:
    """Delete all but the newest `keep_last` checkpoints and those named in `keep`. A collective.

    Nothing is deleted unless the newest one verifies, all its bytes read again.

    Returns:
        What was deleted, on every rank.

    Raises:
        CheckpointError: the newest does not verify, or a folder cannot be deleted.
    """
    if keep_last is None:
        return []

    there = [name for _, name in agreed_steps(storage, world)]
    names = [name for name in there[:-keep_last] if name not in keep]
    if not names:
        return []
    try:
        open_verified(storage, there[-1], world)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; no older checkpoint was deleted") from error

    def remove() -> None:
        if world.rank == 0:
            for name in names:
                storage.remove(name)

    agreed(world, f"old checkpoints in {storage.root} could not be deleted", remove)
    return names
