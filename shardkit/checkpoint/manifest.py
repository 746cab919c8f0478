"""The manifest of a checkpoint: where every element of every tensor lies, and all that is not a tensor.

`manifest.json` is one JSON object. Its first line holds the sha256 of all bytes after that line, the rest is this
module's `Manifest`. A hostile file can still lie about numbers: checksums are for accidents.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from shardkit.checkpoint.storage import MANIFEST, Storage, read_bytes
from shardkit.checkpoint.tensors import DTYPES
from shardkit.errors import CheckpointError

FORMAT = "shardkit-checkpoint"
VERSION = 1

Key = tuple[str, str, str | None]
# (kind, full name, state): kind is parameter, buffer, optimizer (its state's key is the third) or rng.


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some elements of a tensor, in row-major order, in a file."""

    start: int
    length: int
    # In elements.
    file: str
    offset: int
    # Of the first byte, from the beginning of the file.


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor; its chunks hold each element once, in order."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class File:
    """What a file must be."""

    bytes: int
    crc32: str
    # Eight hexadecimal digits, of the whole file.


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint without its tensors' elements."""

    step: int
    created: str
    # ISO 8601, UTC.
    backend: str
    world_size: int
    versions: Mapping[str, str]
    files: Mapping[str, File]
    entries: Mapping[Key, Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Other names of tied parameters -> the name they are stored under.
    optimizer: str = ""
    # Class of the optimizer.
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Parameter -> key -> what the optimizer keeps that is no tensor, encoded.
    groups: Sequence[Mapping[str, Any]] = ()
    # One mapping a parameter group: "parameters", a list of full names, and the options, encoded.
    training: Mapping[str, Any] = field(default_factory=dict)
    # Position, scheduler, normalization report and so on, encoded; see `shardkit.checkpoint.training`.

    def named(self, kind: str) -> dict[str, Entry]:
        """The entries of a kind, by full name."""
        return {key[1]: entry for key, entry in self.entries.items() if key[0] == kind}


def dump(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    numbers = {name: index for index, name in enumerate(manifest.files)}
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "created": manifest.created,
        "backend": manifest.backend,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "files": [{"name": name, "bytes": f.bytes, "crc32": f.crc32} for name, f in manifest.files.items()],
        "aliases": dict(manifest.aliases),
        "optimizer": {
            "class": manifest.optimizer,
            "groups": list(manifest.groups),
            "numbers": {name: dict(values) for name, values in manifest.numbers.items()},
        },
        "training": dict(manifest.training),
        "tensors": [
            {
                "kind": kind,
                "name": name,
                **({"state": state} if state is not None else {}),
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "chunks": [[c.start, c.length, numbers[c.file], c.offset] for c in entry.chunks],
            }
            for (kind, name, state), entry in manifest.entries.items()
        ],
    }
    # A line a value at the top, so that people can read it and grep in it.
    lines = []
    for key, value in body.items():
        if isinstance(value, list) and value:
            items = ",\n  ".join(json.dumps(each, allow_nan=False) for each in value)
            lines.append(f'"{key}": [\n  {items}\n ]')
        else:
            lines.append(f'"{key}": {json.dumps(value, allow_nan=False)}')
    text = (" " + ",\n ".join(lines) + "\n}\n").encode()
    return _first_line(text) + text


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in the bytes of manifest.json.

    Raises:
        CheckpointError: naming `where`: the bytes are not those that were written, or no manifest of this version.
    """
    first, _, rest = data.partition(b"\n")
    if first + b"\n" != _first_line(rest):
        raise CheckpointError(f"{where} is damaged: its contents do not match the sha256 in its first line")
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}")
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{where} has version {body['version']} of the format, and this shardkit reads version {VERSION}; "
                "use the shardkit that wrote it"
            )
        return _manifest(body)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{where} is no manifest of a shardkit checkpoint: {error}") from error


def read(storage: Storage, name: str) -> Manifest:
    """The manifest of the checkpoint `name`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    where = f"{storage.root}/{name}/{MANIFEST}"
    try:
        data = read_bytes(storage, f"{name}/{MANIFEST}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{where} is not there, so this is no complete checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
    return parse(data, where)


def check_chunks(key: Key, entry: Entry, files: Mapping[str, File]) -> None:
    """Each element lies in one chunk, and each chunk in its file.

    Raises:
        ValueError: it is not so.
    """
    size, expected = DTYPES[entry.dtype].itemsize, 0
    for chunk in entry.chunks:
        if chunk.start != expected or chunk.length < 0 or chunk.offset < 0:
            raise ValueError(f"the chunks of {shown(key)} do not hold its elements once each")
        if chunk.offset + chunk.length * size > files[chunk.file].bytes:
            raise ValueError(f"a chunk of {shown(key)} lies outside {chunk.file}")
        expected += chunk.length
    if expected != entry.numel or any(length < 0 for length in entry.shape):
        raise ValueError(f"the chunks of {shown(key)} hold {expected} of {entry.numel} elements")


def shown(key: Key) -> str:
    """A key as people read it: "layer.weight", "exp_avg of layer.weight"."""
    kind, name, state = key
    if state is not None:
        return f"{state} of {name}"
    return name if kind == "parameter" else f"{kind} {name}"


def _first_line(rest: bytes) -> bytes:
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'


def _manifest(body: dict[str, Any]) -> Manifest:
    files: dict[str, File] = {}
    for each in body["files"]:
        name = str(each["name"])
        if not re.fullmatch(r"\w[\w.-]*", name) or name == MANIFEST:
            raise ValueError(f"{name!r} cannot be a file of a checkpoint")
        files[name] = File(bytes=_whole(each["bytes"]), crc32=str(each["crc32"]))
    names = list(files)
    entries: dict[Key, Entry] = {}
    for each in body["tensors"]:
        key: Key = (str(each["kind"]), str(each["name"]), cast("str | None", each.get("state")))
        chunks = (
            Chunk(start=_whole(start), length=_whole(length), file=names[_whole(file)], offset=_whole(offset))
            for start, length, file, offset in each["chunks"]
        )
        if each["dtype"] not in DTYPES:
            raise ValueError(f"{shown(key)} has the unknown dtype {each['dtype']!r}")
        entry = Entry(shape=tuple(map(_whole, each["shape"])), dtype=each["dtype"], chunks=tuple(chunks))
        check_chunks(key, entry, files)
        entries[key] = entry
    optimizer = body["optimizer"]
    return Manifest(
        step=_whole(body["step"]),
        created=str(body["created"]),
        backend=str(body["backend"]),
        world_size=_whole(body["world_size"]),
        versions=body["versions"],
        files=files,
        entries=entries,
        aliases=body["aliases"],
        optimizer=optimizer["class"],
        numbers=optimizer["numbers"],
        groups=optimizer["groups"],
        training=body["training"],
    )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return value
