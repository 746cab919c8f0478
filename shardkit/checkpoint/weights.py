"""Weights to start from: a checkpoint, a safetensors file or a Hugging Face folder, as a source read by ranges."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.place import is_local, one, reach, split, there
from shardkit.checkpoint.source import Source, source_of_files
from shardkit.checkpoint.storage import Storage, read_bytes
from shardkit.checkpoint.verification import verify_files
from shardkit.errors import CheckpointError, RequestError
from shardkit.world import World

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_weights(path: str, world: World | None = None) -> Source:
    """Parameters and buffers at `path`; a shardkit checkpoint's files are verified, of others only headers are read.

    Args:
        path: local or with a scheme: a shardkit checkpoint, a folder of them or a run folder (the newest whose files
            have their sizes), a safetensors file, or a Hugging Face folder.

        world: the ranks that verify together, and agree on what they find; None = this process alone.

    Raises:
        RequestError: there is nothing of that kind; the message says what is there.
        CheckpointError: a file is damaged, or a shard is missing.
    """
    above, name = split(path)
    try:
        if name.endswith(_PICKLES):
            raise _is_pickle(path)
        if name.endswith(SUFFIX):
            return _files(reach(above), [name], path)
        if name.endswith(INDEX):
            return _indexed(reach(above), name)
        folder = reach(path)
        names = folder.names()
        if "manifest.json" not in names:
            found = _hugging_face(folder, names)
            if found is not None:
                return found
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return _checkpoint(path, world or World())


def _checkpoint(path: str, world: World) -> Source:
    """The weights of a shardkit checkpoint; what else it holds means nothing to a fresh run."""
    place = one(path)
    manifest = place.manifest()
    # Shared out over the ranks; one that finds a damaged file tells the others.
    verify_files(place.storage, place.name, manifest, sorted(manifest.files)[world.rank :: world.size])
    entries = {key: entry for key, entry in manifest.entries.items() if key[0] not in ("optimizer", "rng")}
    return Source(
        storage=place.storage,
        folder=place.name,
        entries=entries,
        aliases=manifest.aliases,
        normalization=decode(dict(manifest.training)).get("normalization"),
    )


def _hugging_face(folder: Storage, names: list[str]) -> Source | None:
    indexes = [name for name in names if name.endswith(INDEX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    if f"model{SUFFIX}" in files:
        return _files(folder, [f"model{SUFFIX}"], folder.root)
    if len(indexes) == 1:
        return _indexed(folder, indexes[0])
    if len(files) == 1:
        return _files(folder, files, folder.root)
    if files or indexes:
        raise RequestError(
            f"{folder.root} holds {', '.join([*indexes, *files][:6])}, and no model.safetensors or one *{INDEX} that "
            "says how they belong together; name the file that is meant"
        )
    pickles = [name for name in names if name.endswith(_PICKLES) and not name.startswith("training_args")]
    if pickles:
        raise _is_pickle(f"{folder.root}/{pickles[0]}")
    return None


def _indexed(folder: Storage, name: str) -> Source:
    """The shards an index names."""
    where = f"{folder.root}/{name}"
    try:
        table = json.loads(read_bytes(folder, name))["weight_map"]
        homes = {str(tensor): str(file) for tensor, file in table.items()}
    except FileNotFoundError as error:
        raise RequestError(f"{where} is not there: {there(folder.root)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is no index of safetensors files: it has no readable weight_map") from error
    files = sorted(set(homes.values()))
    strange = [file for file in files if "/" in file or "\\" in file or not file.endswith(SUFFIX)]
    if strange:
        raise CheckpointError(f"{where} names {strange[0]!r}; expected safetensors files beside it")
    present = folder.names()
    missing = [file for file in files if file not in present]
    if missing:
        lost = [tensor for tensor, file in homes.items() if file == missing[0]]
        raise CheckpointError(
            f"{folder.root} lacks {', '.join(missing)}, and {name} says that {lost[0]} and others are in there; "
            "download all shards"
        )
    source = _files(folder, files, where)
    gone = [tensor for tensor in homes if source.find(("weight", tensor, None)) is None]
    if gone:
        raise CheckpointError(f"{where} says that {homes[gone[0]]} holds {gone[0]}, and it does not")
    return source


def _files(storage: Storage, files: Sequence[str], path: str) -> Source:
    try:
        return source_of_files(storage, list(files))
    except FileNotFoundError as error:
        raise RequestError(f"{path} is not there: {there(path)}") from error
    except IsADirectoryError as error:
        raise RequestError(f"{path} is a folder; expected a safetensors file") from error


def _is_pickle(path: str) -> RequestError:
    if is_local(path) and not os.path.exists(path):  # noqa: PTH110
        return RequestError(f"{path} is not there, and would be a pickle: {there(split(path)[0])}")
    return RequestError(
        f"{path} is a pickle, which can run code when it is opened; convert it with safetensors "
        "(safetensors.torch.save_file), and give that file"
    )
