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
from typing import Any

from shardkit.checkpoint.encoding import check_depth
from shardkit.checkpoint.storage import MANIFEST, Storage, read_bytes
from shardkit.checkpoint.tensors import DTYPES, shape_of
from shardkit.errors import CheckpointError

FORMAT = "shardkit-checkpoint"
VERSION = 1
KINDS = ("parameter", "buffer", "optimizer", "rng", "weight")
LARGEST = 2**30
# Bytes of a manifest.json that are read; a million chunks take 50 MB.

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
    digest: str = field(default="", compare=False)
    # The sha256 of the bytes it was parsed from.

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
        body = json.loads(data, parse_constant=_refuse)
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}")
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{where} has version {body['version']} of the format, and this shardkit reads version {VERSION}; "
                "use the shardkit that wrote it"
            )
        return _manifest(body, hashlib.sha256(data).hexdigest())
    except KeyError as error:
        raise CheckpointError(f"{where} is no manifest of a shardkit checkpoint: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{where} is no manifest of a shardkit checkpoint: {error}") from error


def read(storage: Storage, name: str) -> Manifest:
    """The manifest of the checkpoint `name`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    where = f"{storage.root}/{name}/{MANIFEST}"
    try:
        size = storage.size(f"{name}/{MANIFEST}")
        if size > LARGEST:
            raise CheckpointError(f"{where} has {size} bytes, more than any manifest ({LARGEST})")
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
    if expected != entry.numel:
        raise ValueError(f"the chunks of {shown(key)} hold {expected} of {entry.numel} elements")


def shown(key: Key) -> str:
    """A key as people read it: "layer.weight", "exp_avg of layer.weight"."""
    kind, name, state = key
    if state is not None:
        return f"{state} of {name}"
    return name if kind == "parameter" else f"{kind} {name}"


def _first_line(rest: bytes) -> bytes:
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'


def _manifest(body: dict[str, Any], digest: str) -> Manifest:
    files: dict[str, File] = {}
    for each in _list(body["files"]):
        name = _text(each["name"])
        if not re.fullmatch(r"\w[\w.-]*", name) or name == MANIFEST:
            raise ValueError(f"{name!r} cannot be a file of a checkpoint")
        if name in files:
            raise ValueError(f"it lists {name} twice")
        files[name] = File(bytes=_whole(each["bytes"]), crc32=_text(each["crc32"]))
    names = list(files)
    entries: dict[Key, Entry] = {}
    for each in _list(body["tensors"]):
        key = _key(each)
        if key in entries:
            raise ValueError(f"it lists {shown(key)} twice")
        entries[key] = _entry(key, each, names)
        check_chunks(key, entries[key], files)
    _check_room(entries, files)
    optimizer = body["optimizer"]
    return Manifest(
        step=_whole(body["step"]),
        created=_text(body["created"]),
        backend=_text(body["backend"]),
        world_size=_whole(body["world_size"]),
        versions=_texts(body["versions"]),
        files=files,
        entries=entries,
        aliases=_texts(body["aliases"]),
        optimizer=_text(optimizer["class"]),
        numbers={_text(name): _mapping(values) for name, values in _mapping(optimizer["numbers"]).items()},
        groups=[_group(each) for each in _list(optimizer["groups"])],
        training=_mapping(body["training"]),
        digest=digest,
    )


def _key(tensor: Mapping[str, Any]) -> Key:
    kind, state = _text(tensor["kind"]), tensor.get("state")
    if kind not in KINDS or (state is not None) != (kind == "optimizer"):
        raise ValueError(f"a tensor has the unknown kind {kind!r}, or a state that does not go with it")
    return kind, _text(tensor["name"]), None if state is None else _text(state)


def _entry(key: Key, tensor: Mapping[str, Any], files: Sequence[str]) -> Entry:
    if tensor["dtype"] not in DTYPES:
        raise ValueError(f"{shown(key)} has the unknown dtype {tensor['dtype']!r}")
    chunks = [
        Chunk(start=_whole(start), length=_whole(length), file=files[_whole(file)], offset=_whole(offset))
        for start, length, file, offset in _list(tensor["chunks"])
    ]
    return Entry(shape=shape_of(tensor["shape"]), dtype=tensor["dtype"], chunks=tuple(chunks))


def _check_room(entries: Mapping[Key, Entry], files: Mapping[str, File]) -> None:
    """A small file cannot be said to hold much: each of its bytes is of one tensor.

    Raises:
        ValueError: it is.
    """
    pieces: dict[str, list[tuple[int, int]]] = {}
    for entry in entries.values():
        size = DTYPES[entry.dtype].itemsize
        for chunk in entry.chunks:
            if chunk.length:
                pieces.setdefault(chunk.file, []).append((chunk.offset, chunk.offset + chunk.length * size))
    for file, spans in pieces.items():
        end = 0
        for begin, stop in sorted(spans):
            if begin < end:
                raise ValueError(f"two chunks lie over each other in {file}")
            end = stop


def _group(value: Any) -> dict[str, Any]:
    names = [_text(name) for name in _list(value["parameters"])]
    return {**_mapping(value), "parameters": names, "options": _mapping(value["options"])}


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{_brief(value)} is no mapping")
    check_depth(value)
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{_brief(value)} is no list")
    return value


def _texts(value: Any) -> dict[str, str]:
    return {key: _text(each) for key, each in _mapping(value).items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_brief(value)} is no text")
    # Half a surrogate pair could not be printed.
    value.encode()
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{_brief(value)} is not a whole number of 0 or more")
    return value


def _brief(value: Any) -> str:
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
