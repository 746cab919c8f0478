"""Resume: find the checkpoint a run goes on from, and bring an engine and all else to where it stood."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.history import Found, is_checkpoint, newest, steps, supersede
from shardkit.checkpoint.restore import Choice, restore
from shardkit.checkpoint.source import Source, source_of
from shardkit.checkpoint.storage import Storage, open_storage
from shardkit.checkpoint.training import Position, check_norms, position_in, restore_scheduler
from shardkit.checkpoint.verification import Verify, open_verified
from shardkit.errors import CheckpointError
from shardkit.seeds import seed_apart, write_streams

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from shardkit.data.order import GlobalOrder
    from shardkit.engines.api import Engine
    from shardkit.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run goes on from."""

    position: Position = field(default_factory=Position)
    best: dict[str, Any] | None = None
    checkpoint: str | None = None
    # Where it is; None = the run begins.


def counted(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks != 1 else ''}"


def find(resume: str, own: Storage, world: World, how: Verify = "full") -> Found | None:
    """The checkpoint to go on from, verified; None = start anew. A collective.

    Args:
        resume: "auto", "never", or the path or URL of a checkpoint, or of a folder of them.
        own: the run's checkpoints; what writers that were killed left there is removed.
        world: the ranks.
        how: see `verify_file`.

    Raises:
        CheckpointError: the one that was asked for cannot be used, or none of those that are there.
    """
    cleaned = agreed(world, f"{own.root} cannot be used", lambda: own.clean() if world.rank == 0 else [])
    if cleaned and world.rank == 0:
        log.info("removed what a save that was cut off left in %s: %s", own.root, ", ".join(cleaned))
    if resume == "auto":
        return newest(own, world, how)
    if resume == "never":
        there = agreed(world, f"{own.root} cannot be used", lambda: bool(steps(own)) if world.rank == 0 else False)
        if world.gather(there)[0]:
            raise CheckpointError(
                f"{own.root} holds checkpoints of an earlier run, and checkpoint.resume is never; go on from them with "
                "checkpoint.resume=auto, or give another folder"
            )
        return None
    asked = asked_for(resume, world, how)
    if _same(asked.storage.root, own.root):
        return asked
    # The same command once more goes on from what it has made since; where that is damaged, from where it was told to.
    with suppress(CheckpointError):
        since = newest(own, world, how)
        if since is not None and _began_from(since, resume):
            return since
    return asked


def _same(one: str, other: str) -> bool:
    return one == other if "://" in one + other else Path(one).resolve() == Path(other).resolve()


def made_by(found: Found) -> dict[str, Any]:
    """The recipe of the run that made a checkpoint; empty where none did."""
    return decode(dict(found.manifest.training)).get("recipe") or {}


def _began_from(found: Found, resume: str) -> bool:
    return (made_by(found).get("checkpoint") or {}).get("resume") == resume


def resume_from(
    found: Found,
    engine: Engine,
    *,
    own: Storage,
    order: GlobalOrder,
    scheduler: LRScheduler | None,
    choice: Choice,
    seed: int,
    world: World,
    schedule: Any = None,
) -> Resumed:
    """Bring everything to where the checkpoint was made. A collective; what a user has to know is logged by rank 0.

    Args:
        schedule: `scheduler:` of the recipe, to be held to that of the checkpoint's.

    Raises:
        CheckpointError: it does not fit this run; see `restore`, `position_in`, `check_norms`.
    """
    manifest, source = found.manifest, source_of(found.storage, found.name, found.manifest)
    saved = {"step": manifest.step, **decode(dict(manifest.training))}
    notes = [f"{broken}; an older one is used" for broken in found.broken]
    notes += agreed(
        world, "the checkpoint does not fit", lambda: check_norms(saved.get("normalization"), _norms(engine))
    )
    position, changed = agreed(world, "the checkpoint does not fit", lambda: position_in(saved, order))
    notes += changed
    restored = restore(engine, source, manifest, choice, world)
    notes += restored.notes
    replay = choice.groups == "recipe"
    before = saved.get("recipe")
    settings = (before.get("scheduler"), schedule) if before else None
    notes += agreed(
        world,
        "the checkpoint does not fit",
        lambda: restore_scheduler(
            scheduler,
            saved.get("scheduler"),
            engine.optimizer,
            replay=replay,
            step=position.step,
            settings=settings,
        ),
    )
    notes += agreed(
        world,
        "the random streams were not loaded",
        lambda: _streams(source, saved.get("random") or {}, position, seed, world),
    )
    aside = supersede(own, position.step, world)
    if aside:
        notes.append(f"steps that are made again were set aside as superseded-...: {', '.join(aside)}")
    where = f"{found.storage.root}/{found.name}"
    if world.rank == 0:
        log.info(
            "shardkit: going on from %s (step %d, made on %s with %s)",
            *(where, position.step, manifest.backend, counted(manifest.world_size)),
        )
        for note in notes:
            log.warning("shardkit: resume: %s", note)
    return Resumed(position=position, best=saved.get("best"), checkpoint=where)


def start_from(source: Source, where: str, engine: Engine, choice: Choice, world: World) -> None:
    """Load weights and buffers alone, for a run that begins. A collective.

    Raises:
        CheckpointError: they do not fit the model.
    """
    # Only a shardkit checkpoint says what its norms were; those that are left out may be others.
    norms = source.normalization and {
        **source.normalization,
        "rows": [r for r in source.normalization["rows"] if any(choice.wants(f"{name}.weight") for name in r["names"])],
    }
    agreed(world, "init_from does not fit", lambda: check_norms(norms, _norms(engine)))
    restored = restore(engine, source, None, choice, world)
    if world.rank == 0:
        log.info("shardkit: %d parameters and buffers from %s", restored.loaded, where)
        for note in restored.notes:
            log.warning("shardkit: init_from: %s", note)


def asked_for(path: str, world: World, how: Verify, what: str = "checkpoint.resume") -> Found:
    """The checkpoint at `path`, or the newest in it that verifies; `what` names it in errors. A collective.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    storage = open_storage(path)
    if agreed(world, f"{what}={path}", lambda: is_checkpoint(storage)):
        parent, name = _split(path)
        storage = open_storage(parent)
        return Found(storage=storage, name=name, manifest=open_verified(storage, name, world, how))
    for folder in (path, f"{path.rstrip('/')}/checkpoints"):
        found = newest(open_storage(folder), world, how)
        if found is not None:
            return found
    raise CheckpointError(
        f"{what}={path}: there is no checkpoint; expected the path of one (step-...), or of a folder of them"
    )


def _split(path: str) -> tuple[str, str]:
    if "://" in path:
        parent, _, name = path.rstrip("/").rpartition("/")
        return parent, name
    absolute = Path(path).absolute()
    return str(absolute.parent), absolute.name


def _norms(engine: Engine) -> dict[str, Any]:
    return engine.norms.applied.to_json()


def restore_streams(source: Source, world_size: int, world: World) -> bool:
    """Put this rank's random streams where they were saved; False when there were other ranks then."""
    key = ("rng", str(world.rank), None)
    entry = source.entries.get(key)
    if entry is None or world_size != world.size:
        return False
    data = torch.empty(entry.numel, dtype=torch.uint8)
    source.read(key, 0, data)
    try:
        write_streams(data.numpy().tobytes(), world.device)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the random streams of rank {world.rank} in {source.storage.root}/{source.folder} are damaged; "
            "checkpoint.verify=full finds the file"
        ) from error
    return True


def _streams(source: Source, saved: dict[str, Any], position: Position, seed: int, world: World) -> list[str]:
    """Random streams: those that were saved, or others when the number of ranks is another."""
    ranks = saved.get("world_size", 0)
    if saved.get("seed") == seed and restore_streams(source, ranks, world):
        return []
    seed_apart(seed, world.rank, position.step)
    if saved.get("seed") == seed:
        what = f"{counted(world.size)} now, and {counted(ranks)} in the checkpoint"
    else:
        what = f"the seed is {seed}, and the checkpoint has {saved.get('seed', 'none')}"
    return [f"random streams begin anew from (seed, step, rank), for dropout and the like: {what}"]
