"""Checkpoints for people with a loop of their own: one call to save, one to load."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.history import retire
from shardkit.checkpoint.keeper import streams_part
from shardkit.checkpoint.restore import Choice, restore
from shardkit.checkpoint.resume import asked_for, counted, restore_streams
from shardkit.checkpoint.save import content_of, write_checkpoint
from shardkit.checkpoint.source import source_of
from shardkit.checkpoint.storage import open_storage
from shardkit.checkpoint.training import check_norms
from shardkit.engines.api import Engine
from shardkit.seeds import read_streams

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `load_checkpoint` found besides tensors."""

    step: int
    training: dict[str, Any]
    # As it was given to `save_checkpoint`.
    notes: tuple[str, ...]
    # What was not loaded or is another now, a sentence each; the same on every rank.


def save_checkpoint(
    engine: Engine,
    folder: str | PathLike[str],
    *,
    step: int,
    training: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    export: bool = False,
) -> str:
    """Save weights, buffers, optimizer and random streams as `folder/step-...`. Every rank calls it.

    Args:
        engine: between two windows.
        folder: shared by all ranks, or a URL that fsspec opens.
        step: optimizer steps made; names the checkpoint.
        training: what else to keep, as `{"scheduler": scheduler.state_dict(), "epoch": 3}`: numbers, texts, lists and
            mappings of them, small tensors. Rank 0's is kept.
        keep_last: delete older checkpoints in `folder` than the newest so many; None = none.
        export: also write model.safetensors, whole weights in the model's own names.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: on all ranks: it cannot be written; earlier checkpoints are as they were.
    """
    world, storage = engine.world, open_storage(fspath(folder))
    kept = {
        "own": dict(training or {}),
        "normalization": engine.norms.applied.to_json(),
        "random": {"seed": None, "world_size": world.size},
    }
    streams = streams_part(world.rank, read_streams(world.device))
    content = content_of(engine, step=step, training=kept, extra=[streams])
    agreed(world, f"{storage.root} cannot be used", lambda: storage.clean() if world.rank == 0 else [])
    name = write_checkpoint(storage, content, world, export=export)
    # Also where it is not the one of the highest step, as after going on from an earlier one.
    retire(storage, keep_last=keep_last, keep=(name,), world=world)
    return f"{storage.root}/{name}"


def load_checkpoint(
    engine: Engine,
    path: str | PathLike[str],
    *,
    strict: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    cast: bool = False,
    groups: Literal["checkpoint", "recipe"] = "checkpoint",
) -> Loaded:
    """Load what `save_checkpoint`, or a run, has saved, whatever the backend and the number of ranks then and now.

    Args:
        engine: freshly opened or not; every rank calls it.
        path: a checkpoint, or a folder of them: the newest that verifies.
        strict: False tells in the result what only the checkpoint or only the model has, instead of refusing it.
        include: globs on full names; empty = all.
        exclude: globs on names that are left as they are.
        cast: let weights be loaded into another dtype.
        groups: whose options (lr, weight decay, ...) the parameter groups have afterwards: the checkpoint's, or
            "recipe", those the optimizer was built with.

    Raises:
        CheckpointError: on all ranks: there is none, it is damaged, or does not fit; nothing was changed then.
    """
    world = engine.world
    found = asked_for(fspath(path), world, "full", "path")
    saved = decode(dict(found.manifest.training))
    norms = saved.get("normalization")
    notes = agreed(world, "the checkpoint does not fit", lambda: check_norms(norms, engine.norms.applied.to_json()))
    source = source_of(found.storage, found.name, found.manifest)
    choice = Choice(strict=strict, include=include, exclude=exclude, cast=cast, groups=groups)
    notes += restore(engine, source, found.manifest, choice, world).notes
    random = saved.get("random")
    ranks = random.get("world_size", 0) if isinstance(random, dict) else 0
    if not agreed(world, "the random streams were not loaded", lambda: restore_streams(source, ranks, world)):
        notes.append(f"random streams go on as they are: the checkpoint has those of {counted(ranks)}")
    return Loaded(step=found.manifest.step, training=saved.get("own", saved), notes=(*found.broken, *notes))
