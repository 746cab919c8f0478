"""torch.distributed.checkpoint folders, read and written.

A folder has `.metadata`, a pickle that says where the pieces of every value lie, and `*.distcp` files in which each
piece is what torch.save wrote. Both are opened so that nothing but plain data and tensors comes out; a folder that
needs more is opened on the user's word only, in a process of its own.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.export import weights_of, whole
from shardkit.checkpoint.foreign.child import Job, open_all
from shardkit.checkpoint.foreign.imported import Found, Imported, kind_of, split_state, step_of
from shardkit.checkpoint.foreign.plain import Kept
from shardkit.checkpoint.foreign.unpickler import Forbidden, Thing, loads
from shardkit.checkpoint.manifest import Key, Manifest
from shardkit.checkpoint.source import Source
from shardkit.checkpoint.tensors import DTYPES
from shardkit.errors import CheckpointError, RequestError

METADATA = ".metadata"
_OWN = "torch.distributed.checkpoint."
# All that a .metadata of torch's own planner and writer names.
_ALLOWED = {
    *((f"{_OWN}metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_OWN}metadata", f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    (f"{_OWN}metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_OWN}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
_MODEL = ("model",)
_OPTIMIZER = ("optimizer", "optim", "optimizers")
Path_ = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where one piece of a value lies."""

    file: str
    offset: int
    length: int
    start: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    # The block of a tensor that it is.


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of the folder; `shape` is None where it is no tensor."""

    path: Path_
    parts: tuple[Part, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


def read(folder: Path, scratch: Path, *, trust: bool) -> Imported:
    """A DCP folder with a model and, where there is one, its optimizer.

    Args:
        folder: with `.metadata`.
        scratch: where the process that opens pickles leaves their tensors.
        trust: open what names more than plain data and tensors.

    Raises:
        RequestError: it does, and `trust` is not given; or no model is in it.
        CheckpointError: files are missing or damaged.
    """
    scratch.mkdir()
    values = _values(folder, scratch, trust)
    opener = Trusting(folder, scratch) if trust else Opener(folder)
    return _imported(values, opener)


class Opener:
    """Opens pieces with torch's own unpickler for weights, which makes nothing but plain data and tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, parts: Sequence[Part]) -> Iterator[Any]:
        for part in parts:
            try:
                yield torch.load(io.BytesIO(_bytes(self.folder, part)), map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise _needs_trust(f"{self.folder}/{part.file}", _line(error)) from error
            except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
                raise CheckpointError(f"{self.folder}/{part.file} is damaged: {_line(error)}") from error


class Trusting(Opener):
    """Opens what the other one refuses in a process of its own."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        super().__init__(folder)
        self.scratch = scratch
        self.count = 0

    def open(self, parts: Sequence[Part]) -> Iterator[Any]:
        for part in parts:
            try:
                yield next(super().open([part]))
            except RequestError:
                self.count += 1
                job = Job(path=str(self.folder / part.file), offset=part.offset, length=part.length)
                yield _solid(open_all([job], self.scratch / f"value-{self.count}")[0])


def write(folder: Path, manifest: Manifest, source: Source) -> None:
    """Write {"model": ..., "optimizer": ...} as torch's get_state_dict names them, a tensor at a time."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save

    places: dict[str, Key] = {}

    def promised(path: Sequence[str], key: Key) -> torch.Tensor:
        """Only what it looks like; it is read when it is written."""
        entry = source.find(key)
        assert entry is not None
        places[".".join(path)] = key
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    state: dict[str, Any] = {"model": {}}
    for name, (key, _) in weights_of(source).items():
        state["model"][name] = promised(("model", name), key)
    if manifest.groups:
        states: dict[str, dict[str, Any]] = {name: decode(kept) for name, kept in manifest.numbers.items()}
        for key in manifest.entries:
            if key[0] == "optimizer":
                where = ("optimizer", "state", key[1], str(key[2]))
                states.setdefault(key[1], {})[str(key[2])] = promised(where, key)
        groups = [{**decode(group["options"]), "params": list(group["parameters"])} for group in manifest.groups]
        state["optimizer"] = {"state": states, "param_groups": groups}

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            key = places.get(write_item.index.fqn)
            return whole(source, key) if key is not None else super().resolve_data(write_item)

    with warnings.catch_warnings():
        # It says that it takes one process for all there is, which is so.
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(folder, single_file_per_rank=True)
        save(state, storage_writer=writer, planner=Planner(), no_dist=True)


def _values(folder: Path, scratch: Path, trust: bool) -> dict[str, Value]:
    """What `.metadata` says of the folder, by flattened key."""
    where = folder / METADATA
    try:
        metadata = loads(where.read_bytes(), _ALLOWED)
    except Forbidden as error:
        if not trust:
            raise _needs_trust(str(where), f"it names {error}") from error
        metadata = open_all([Job(path=str(where), bare=True)], scratch / "metadata")[0]
    except Exception as error:
        raise CheckpointError(f"{where} cannot be read: {_line(error)}") from error
    try:
        return _understood(metadata)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{where} is no metadata of a known version: {_line(error)}") from error


def _understood(metadata: Any) -> dict[str, Value]:
    stored: dict[str, list[tuple[tuple[int, ...] | None, Part]]] = {}
    for index, info in metadata.get("storage_data").items():
        offset = index.get("offset")
        if info.get("transform_descriptors"):
            raise ValueError(f"{index.get('fqn')} is stored through an extension")
        part = Part(file=str(info.get("relative_path")), offset=int(info.get("offset")), length=int(info.get("length")))
        stored.setdefault(str(index.get("fqn")), []).append((None if offset is None else tuple(offset), part))
    paths = metadata.get("planner_data") or {}
    values = {}
    for key, said in metadata.get("state_dict_metadata").items():
        path = tuple(paths[key]) if isinstance(paths, dict) and key in paths else tuple(str(key).split("."))
        if said.named.endswith("BytesStorageMetadata"):
            values[key] = Value(path=path, parts=tuple(part for _, part in stored[key]), shape=None, dtype=None)
            continue
        shape = tuple(map(int, said.get("size")))
        sizes = {tuple(c.get("offsets")): tuple(map(int, c.get("sizes"))) for c in said.get("chunks")}
        parts = []
        for offset, part in stored.get(key, ()):
            start = offset if offset is not None else (0,) * len(shape)
            parts.append(Part(file=part.file, offset=part.offset, length=part.length, start=start, shape=sizes[start]))
        values[key] = Value(path=path, parts=tuple(parts), shape=shape, dtype=_dtype(said.get("properties")))
    return values


def _dtype(properties: Thing) -> torch.dtype:
    state: Any = properties.state
    dtype = state[0] if isinstance(state, list | tuple) else state["dtype"]
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."))


def _imported(values: Mapping[str, Value], opener: Opener) -> Imported:
    model, optimizer, extra = _sorted(values)
    if not model:
        raise RequestError(
            f"{opener.folder} holds no tensors of a model: expected them under the key 'model' or at the top; it has "
            f"{', '.join(list(values)[:5])}"
        )
    states, groups = _optimizer(optimizer, model, opener)
    trained = {name for group in groups for name in group["parameters"]} | set(states)
    tensors: dict[Key, Found] = {}
    for name, value in model.items():
        assert value.shape is not None and value.dtype is not None
        tensors[kind_of(name, value.dtype, name in trained), name, None] = _found(value, opener)
    numbers: dict[str, dict[str, Any]] = {}
    for name, kept in states.items():
        shape = model[name].shape or ()
        for key, value in kept.items():
            if isinstance(value, Value) and (value.shape or (not shape and key != "step")):
                tensors["optimizer", name, key] = _found(value, opener)
        plain = {key: _value(v, opener) for key, v in kept.items() if ("optimizer", name, key) not in tensors}
        if plain:
            numbers[name] = split_state(plain, shape)[1]
    ranks = {match[1] for v in values.values() for p in v.parts if (match := re.match(r"__(\d+)_", p.file))}
    kept, notes = _extra(extra, Opener(opener.folder))
    steps = [v for key, v in kept.items() if key.rpartition(".")[2] in ("step", "global_step") and type(v) is int]
    return Imported(
        origin="torch-dcp",
        world_size=max(1, len(ranks)),
        step=steps[0] if steps else step_of(numbers),
        tensors=tensors,
        numbers=numbers,
        groups=groups,
        extra=kept,
        notes=notes,
    )


def _sorted(values: Mapping[str, Value]) -> tuple[dict[str, Value], dict[Path_, Value], dict[str, Value]]:
    """The model's tensors by name, the optimizer's values by path below it, and all else."""
    model: dict[str, Value] = {}
    optimizer: dict[Path_, Value] = {}
    extra: dict[str, Value] = {}
    named = any(part in _MODEL for value in values.values() for part in value.path[:2] if len(value.path) > 1)
    for key, value in values.items():
        # At the top, or below the one object that holds all.
        depth = next((d for d in (0, 1) if d < len(value.path) - 1 and value.path[d] in (*_MODEL, *_OPTIMIZER)), None)
        if depth is not None and value.path[depth] in _OPTIMIZER:
            optimizer[value.path[depth + 1 :]] = value
        elif depth is not None and value.shape is not None:
            model[".".join(map(str, value.path[depth + 1 :]))] = value
        elif depth is None and not named and value.shape is not None:
            model[".".join(map(str, value.path))] = value
        else:
            extra[key] = value
    return model, optimizer, extra


def _optimizer(
    values: Mapping[Path_, Value], model: Mapping[str, Value], opener: Opener
) -> tuple[dict[str, dict[str, Value]], list[dict[str, Any]]]:
    """The state by parameter, and the parameter groups, nested as in a state dict or flattened by parameter."""
    states: dict[str, dict[str, Value]] = {}
    options: dict[Any, dict[str, Value]] = {}
    for path, value in values.items():
        text = ".".join(map(str, path))
        head, _, rest = text.partition(".")
        if head == "state":
            name, _, key = rest.rpartition(".")
            if name not in model:
                raise RequestError(
                    f"{opener.folder} has optimizer state of {name!r}, which is no tensor of its model; expected the "
                    "full names that torch.distributed.checkpoint.state_dict.get_state_dict gives"
                )
            states.setdefault(name, {})[key] = value
        elif head == "param_groups" and not rest:
            return states, [_group(dict(each)) for each in _value(value, opener)]
        elif head == "param_groups":
            owner, _, key = rest.rpartition(".")
            options.setdefault(owner, {})[key] = value
    opened = _opened([value for each in options.values() for value in each.values()], opener)
    plain = {owner: {key: next(opened) for key in each} for owner, each in options.items()}
    if not all(owner.isdigit() and "params" in each for owner, each in plain.items()):
        return states, _regrouped(plain)
    return states, [_group(plain[owner]) for owner in sorted(plain, key=int)]


def _group(options: dict[str, Any]) -> dict[str, Any]:
    names = [str(name) for name in options.pop("params")]
    return {"parameters": names, "options": {str(key): value for key, value in options.items() if key[:5] != "param"}}


def _regrouped(plain: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One group of all parameters with the same options: flattened, it is not said which were in one."""
    groups: list[dict[str, Any]] = []
    for name, options in plain.items():
        home = next((group for group in groups if group["options"] == options), None)
        if home is None:
            groups.append({"parameters": [name], "options": options})
        else:
            home["parameters"].append(name)
    return groups


def _extra(values: Mapping[str, Value], opener: Opener) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Plain values besides model and optimizer; what is not plain is left where it is."""
    kept, left = {}, []
    for key, value in values.items():
        try:
            found = None if value.shape is not None else _value(value, opener)
        except (RequestError, CheckpointError):
            found = None
        if isinstance(found, bool | int | float | str):
            kept[key] = found
        else:
            left.append(key)
    return kept, (f"not taken over: {', '.join(left[:5])}{' and more' if len(left) > 5 else ''}",) if left else ()


def _opened(values: Sequence[Value], opener: Opener) -> Iterator[Any]:
    for value in values:
        if len(value.parts) != 1:
            raise CheckpointError(f"{'.'.join(map(str, value.path))} lies in {len(value.parts)} pieces; expected one")
    return opener.open([value.parts[0] for value in values])


def _value(value: Value, opener: Opener) -> Any:
    found = next(_opened([value], opener))
    return found.reshape(value.shape) if isinstance(found, torch.Tensor) and value.shape is not None else found


def _found(value: Value, opener: Opener) -> Found:
    shape, dtype = value.shape, value.dtype
    assert shape is not None and dtype is not None
    parts = sorted(value.parts, key=lambda part: part.start)

    def blocks() -> Iterator[torch.Tensor]:
        for part, block in zip(parts, opener.open(parts), strict=True):
            if not isinstance(block, torch.Tensor) or tuple(block.shape) != part.shape:
                raise CheckpointError(f"{opener.folder}/{part.file} does not hold what {METADATA} says it does")
            yield block

    def pieces() -> Iterator[torch.Tensor]:
        rows = [sum(part.shape[0] for part in parts[:index]) for index in range(len(parts))] if shape else []
        if all(part.shape[1:] == shape[1:] for part in parts) and rows == [part.start[0] for part in parts if shape]:
            # Blocks of rows follow one another.
            yield from (block.contiguous().view(-1) for block in blocks())
            return
        if sum(math.prod(part.shape) for part in parts) != math.prod(shape):
            raise CheckpointError(f"the pieces of {'.'.join(map(str, value.path))} do not make up {shape}")
        full = torch.empty(shape, dtype=dtype)
        for part, block in zip(parts, blocks(), strict=True):
            full[tuple(slice(s, s + n) for s, n in zip(part.start, part.shape, strict=True))] = block
        yield full.view(-1)

    return Found(shape=shape, dtype=dtype, pieces=pieces)


def _solid(value: Any) -> Any:
    """Plain data with its tensors in memory."""
    if isinstance(value, Kept):
        return value.tensor()
    if isinstance(value, list):
        return [_solid(each) for each in value]
    return {key: _solid(each) for key, each in value.items()} if isinstance(value, dict) else value


def _bytes(folder: Path, part: Part) -> bytes:
    with _file(folder, part).open("rb") as file:
        file.seek(part.offset)
        return file.read(part.length)


def _file(folder: Path, part: Part) -> Path:
    """A file of the folder, and never one elsewhere."""
    path = folder / part.file
    if Path(part.file).is_absolute() or ".." in Path(part.file).parts:
        raise CheckpointError(f"{folder}/{METADATA} names {part.file!r}; expected files in the folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is not there, and {METADATA} says it holds tensors; copy all *.distcp files")
    return path


def _needs_trust(where: str, why: str) -> RequestError:
    return RequestError(
        f"{where} holds more than plain data and tensors ({why}): opening it could run code of whoever made it. If you "
        "made it, add --trust"
    )


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    # Of torch's advice only what it met.
    found = re.search(r"GLOBAL ([\w.]+)", text)
    return f"it names {found[1]}" if found else text[:200]
