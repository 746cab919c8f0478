"""Save: every rank writes its shard, rank 0 the manifest, and the folder appears when all of it is on disk."""

from __future__ import annotations

import importlib.metadata
import logging
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardkit.checkpoint.agreement import agreed, described
from shardkit.checkpoint.encoding import encode
from shardkit.checkpoint.manifest import Chunk, Entry, File, Key, Manifest, check_chunks, dump, parse, shown
from shardkit.checkpoint.shard import Part, Written, file_name, own_parts, write_shard
from shardkit.checkpoint.storage import MANIFEST, Storage
from shardkit.engines.api import Engine
from shardkit.engines.registry import BUILT_IN
from shardkit.errors import CheckpointError
from shardkit.normalization.statistics import merge_running_statistics
from shardkit.world import World

LATEST = "latest"
_SHARED = "the folder of checkpoints must be one that all ranks share"

log = logging.getLogger(__name__)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True, kw_only=True)
class Content:
    """What this rank has to say of a checkpoint."""

    step: int
    backend: str
    parts: list[Part]
    numbers: dict[str, dict[str, Any]]
    # Of the parameters this rank holds something of, encoded.
    groups: list[dict[str, Any]]
    optimizer: str
    aliases: Mapping[str, str]
    training: dict[str, Any]
    # Encoded; only rank 0's is kept.


def content_of(
    engine: Engine, *, step: int, training: Mapping[str, Any], extra: Iterable[Part] = (), world: World | None = None
) -> Content:
    """The state of `engine` as it is, after the running statistics of its BatchNorm layers were made to agree.

    A collective. The parts are live views: nothing is copied and nothing gathered.

    Args:
        engine: between two windows.
        step: optimizer steps made.
        training: all else to be kept; see `shardkit.checkpoint.encoding.encode` for what may be in it.
        extra: more parts of this rank, as its random streams.
        world: the ranks; the engine's by default.

    Raises:
        CheckpointError: something cannot be stored, or the live state contradicts itself; on all ranks.
    """
    world = world or engine.world

    def look() -> Content:
        return Content(
            step=step,
            backend=engine.name,
            parts=[*own_parts(engine), *extra],
            numbers={
                name: {key: encode(value, f"{key} of {name}") for key, value in values.items()}
                for name, values in engine.scalars().items()
            },
            groups=[
                {"parameters": list(names), "options": _options(group)}
                for names, group in zip(engine.groups, engine.optimizer.param_groups, strict=True)
            ],
            optimizer=class_name(engine.optimizer),
            aliases=engine.aliases,
            training={key: encode(value, key) for key, value in training.items()},
        )

    merge_running_statistics(engine.model, world, items=engine.norms.items_seen)
    engine.norms.items_seen = 0.0
    return agreed(world, f"checkpoint of step {step} was not saved", look)


def write_checkpoint(storage: Storage, content: Content, world: World, *, export: bool = False) -> str:
    """Write `content` as the checkpoint `step-...`, visible only when all of it is durable. A collective.

    Args:
        storage: where all ranks see the same.
        content: this rank's, from `content_of`; its parts may be snapshots.
        world: the ranks. Only `gather` and `collect` are used, so a background thread can do this on a group of its
            own (`World.aside`).
        export: also write model.safetensors, the whole weights in the model's own names.

    Returns:
        The checkpoint's name.

    Raises:
        CheckpointError: on all ranks; there is no such checkpoint then, and others are as they were.
    """
    name = step_name(content.step)
    failed = f"{storage.root}/{name} was not saved"
    own = file_name(world.rank, world.size)
    staged = agreed(world, failed, lambda: storage.staging(name, secrets.token_hex(4)) if world.rank == 0 else "")
    staging = world.gather(staged)[0]
    try:
        agreed(world, failed, lambda: storage.make(staging) if world.rank == 0 else None)
        written, file = agreed(world, failed, lambda: _write_own(storage, staging, own, content.parts))
        tables = world.collect((own, file, written, content.numbers))
        agreed(world, failed, lambda: _commit(storage, staging, name, content, tables, export) if tables else None)
    except CheckpointError:
        if world.rank == 0:
            _discard(storage, staging, name)
        raise
    if world.rank == 0:
        _point(storage, name)
    return name


def class_name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


Table = tuple[str, File, list[Written], dict[str, dict[str, Any]]]


def _commit(storage: Storage, staging: str, name: str, content: Content, tables: list[Table], export: bool) -> None:
    files = {own: file for own, file, _, _ in tables}
    for own, file in files.items():
        try:
            found = storage.size(f"{staging}/{own}")
        except FileNotFoundError:
            raise CheckpointError(f"{own} was written and is not in {storage.root}; {_SHARED}") from None
        if found != file.bytes:
            raise CheckpointError(f"{own} has {found} bytes on disk, and {file.bytes} were written")
    manifest = Manifest(
        step=content.step,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        backend=content.backend,
        world_size=len(tables),
        versions=versions(),
        files=files,
        entries=_entries([written for _, _, written, _ in tables], files),
        aliases=content.aliases,
        optimizer=content.optimizer,
        numbers=_merged([numbers for _, _, _, numbers in tables]),
        groups=content.groups,
        training=content.training,
    )
    if export:
        from shardkit.checkpoint.export import MODEL, export_weights
        from shardkit.checkpoint.source import source_of

        exported = export_weights(source_of(storage, staging, manifest), storage, f"{staging}/{MODEL}")
        manifest = replace(manifest, files={**files, MODEL: exported})
    data = dump(manifest)
    # A manifest that could not be read would be a lost checkpoint.
    parse(data, f"{storage.root}/{name}/{MANIFEST}")
    storage.put(f"{staging}/{MANIFEST}", data)
    storage.publish(staging, name)


def _write_own(storage: Storage, staging: str, own: str, parts: list[Part]) -> tuple[list[Written], File]:
    try:
        return write_shard(storage, staging, own, parts)
    except FileNotFoundError as error:
        raise CheckpointError(f"{storage.root}/{staging} is not there, and rank 0 has made it; {_SHARED}") from error


def _point(storage: Storage, name: str) -> None:
    """Let `latest` name a checkpoint that is on disk already: nothing reads it but people and their scripts."""
    try:
        storage.put(LATEST, f"{name}\n".encode())
    except Exception as error:
        log.warning("%s/%s was saved, but %s could not be written: %s", storage.root, name, LATEST, described(error))


def _entries(tables: list[list[Written]], files: Mapping[str, File]) -> dict[Key, Entry]:
    """The chunks of all ranks by tensor, each element exactly once."""
    found: dict[Key, tuple[tuple[int, ...], str, list[Chunk]]] = {}
    for table in tables:
        for written in table:
            shape, dtype, chunks = found.setdefault(written.key, (written.shape, written.dtype, []))
            if (shape, dtype) != (written.shape, written.dtype):
                raise CheckpointError(
                    f"{shown(written.key)} is {dtype} {shape} on one rank, {written.dtype} {written.shape} on another"
                )
            chunks.append(written.chunk)
    entries = {}
    for key, (shape, dtype, chunks) in found.items():
        entries[key] = Entry(shape=shape, dtype=dtype, chunks=tuple(sorted(chunks, key=_order)))
        try:
            check_chunks(key, entries[key], files)
        except ValueError as error:
            raise CheckpointError(f"the ranks do not hold the state once between them: {error}") from error
    return entries


def _order(chunk: Chunk) -> tuple[int, int]:
    # A rank without elements may begin where another's do.
    return chunk.start, chunk.length


def _merged(tables: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The optimizer's numbers of all ranks; no rank holds a part of every parameter."""
    merged: dict[str, dict[str, Any]] = {}
    for table in tables:
        for name, numbers in table.items():
            if merged.setdefault(name, numbers) != numbers:
                raise CheckpointError(f"the optimizer's numbers of {name} differ by rank: {merged[name]}, {numbers}")
    return merged


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: encode(value, f"{key} of a parameter group") for key, value in group.items() if key[:5] != "param"}


def versions() -> dict[str, str]:
    """Of the libraries that made the state."""
    from shardkit import __version__

    needed = {name for adapter in BUILT_IN.values() for name in adapter.needs if name in sys.modules}
    return {"shardkit": __version__, **{name: importlib.metadata.version(name) for name in sorted({"torch", *needed})}}


def _discard(storage: Storage, staging: str, name: str) -> None:
    """Remove what was written of a checkpoint that is none; what cannot be removed is cleaned at the next start."""
    with suppress(Exception):
        storage.abandon(staging, name)
