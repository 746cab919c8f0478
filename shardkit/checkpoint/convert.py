"""Convert: shardkit's checkpoints to formats others read, and others' checkpoints to shardkit's."""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from shardkit.checkpoint.agreement import described
from shardkit.checkpoint.export import export_folder, export_weights, weights_of
from shardkit.checkpoint.foreign import dcp, universal, zero
from shardkit.checkpoint.foreign.imported import Imported, optimizer_class, write_imported
from shardkit.checkpoint.history import is_checkpoint, steps
from shardkit.checkpoint.manifest import Manifest
from shardkit.checkpoint.place import CHECKPOINTS, Place, is_local, join, one, reach, split, there
from shardkit.checkpoint.save import step_name
from shardkit.checkpoint.source import Source, source_of
from shardkit.checkpoint.storage import STAGING, Storage
from shardkit.checkpoint.verification import verify_files
from shardkit.errors import CheckpointError, RequestError

Target = Literal["safetensors", "hf", "dcp", "universal", "shardkit"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_STEP = re.compile(r"step-(\d+)")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert."""

    to: Target | None = None
    # None = as SOURCE and OUT suggest.
    dtype: torch.dtype | None = None
    # Of parameters in safetensors files; None = as they are kept.
    max_shard_size: int = 5 * 10**9
    # Bytes a file of a Hugging Face folder.
    trust: bool = False
    # Open pickles.
    optimizer: str | None = None
    # Class of the optimizer of a foreign checkpoint; None = as its state suggests.
    step: int | None = None
    # Of a foreign checkpoint that does not say.


def convert(source: str, out: str, options: Options, say: Say = lambda _: None) -> str:
    """Convert `source` to `out`, which appears whole or not at all.

    Args:
        source: a shardkit checkpoint, a folder of them or a run (the newest that is whole), or a folder that DCP or
            DeepSpeed wrote.
        out: a path or URL where there is nothing yet.
        options: how.
        say: told what a user has to know.

    Returns:
        What was written.

    Raises:
        RequestError: it cannot be done as it was asked.
        CheckpointError: the source is damaged.
    """
    try:
        foreign = foreign_kind(source)
        to = options.to or _suggested(out, foreign is not None)
        _check(out, to, options)
        if foreign is None:
            return _from_shardkit(one(source), out, to, options)
        return _from_foreign(foreign, out, to, options, say)
    except OSError as error:
        raise CheckpointError(f"{source} could not be converted to {out}: {described(error)}") from error


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A folder that another library wrote."""

    kind: Literal["dcp", "zero", "universal"]
    folder: Path


def foreign_kind(source: str) -> Foreign | None:
    """What another library left at `source`; None where shardkit's own is, or is to be found.

    Raises:
        RequestError: there is neither.
    """
    own = reach(source)
    if is_checkpoint(own) or steps(own) or steps(reach(join(source, CHECKPOINTS))):
        return None
    names = own.names()
    if not is_local(source):
        known = {dcp.METADATA, "latest", universal.LATEST, "zero"} & set(names)
        if known or any(name.endswith("_states.pt") for name in names):
            raise RequestError(f"{source} is another library's checkpoint; copy it to this machine to convert it")
        raise RequestError(_unknown(source))
    folder = Path(source)
    for tagged in ("latest", universal.LATEST):
        if tagged in names and not any(name.endswith("_states.pt") for name in names):
            tag = (folder / tagged).read_text(encoding="utf-8", errors="replace").strip()
            if not (folder / tag).is_dir() or "/" in tag or tag in ("", ".."):
                raise RequestError(f"{folder / tagged} names {tag!r}, which is no folder there: {there(source)}")
            folder = folder / tag
            names = sorted(path.name for path in folder.iterdir())
            break
    if dcp.METADATA in names:
        return Foreign(kind="dcp", folder=folder)
    if "zero" in names and (folder / "zero").is_dir():
        return Foreign(kind="universal", folder=folder)
    if any(name.endswith("_states.pt") for name in names):
        return Foreign(kind="zero", folder=folder)
    raise RequestError(_unknown(source))


def parse_size(text: str) -> int:
    """Bytes in "5GB", "500MB" or "2GiB".

    Raises:
        RequestError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise RequestError(f"--max-shard-size: {text!r} is no size; expected a number with a unit, as 5GB or 500MB")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


def target_named(name: str | None) -> Target | None:
    """The format of that name.

    Raises:
        RequestError: there is none.
    """
    if name is not None and name not in get_args(Target):
        raise RequestError(f"--to: {name!r} is no format; expected one of {', '.join(get_args(Target))}")
    return cast("Target | None", name)


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of that name.

    Raises:
        RequestError: there is none.
    """
    if name is not None and name not in DTYPES:
        raise RequestError(f"--dtype: {name!r} is no dtype to cast to; expected one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def _unknown(source: str) -> str:
    return (
        f"{source} is nothing that can be converted: expected a shardkit checkpoint (a folder with manifest.json), a "
        "folder of them or a run folder, a DCP folder (.metadata), or a DeepSpeed folder (latest, *_optim_states.pt, "
        f"or zero/ for a universal one): {there(source)}"
    )


def _suggested(out: str, foreign: bool) -> Target:
    if out.endswith(".safetensors"):
        return "safetensors"
    return "shardkit" if foreign else "hf"


def _check(out: str, to: Target, options: Options) -> None:
    above, name = split(out)
    if to == "safetensors" and not name.endswith(".safetensors"):
        raise RequestError(f"{out}: the name of a safetensors file ends in .safetensors")
    if to != "safetensors" and name.endswith(".safetensors"):
        raise RequestError(f"{out} names a file, and --to {to} writes a folder")
    if options.dtype is not None and to not in ("safetensors", "hf"):
        raise RequestError(f"--dtype is for safetensors files; --to {to} keeps the state as it is")
    if to in ("dcp", "universal") and not is_local(out):
        raise RequestError(f"{out}: --to {to} writes to a local path only; copy the folder afterwards")
    if name in reach(above).names():
        # A folder gets a checkpoint of a new name beside those in it.
        if to == "shardkit" and not _STEP.fullmatch(name) and not is_checkpoint(reach(above), name):
            return
        raise RequestError(f"{out} is there already, and nothing is overwritten; give another name, or remove it first")


def _from_shardkit(place: Place, out: str, to: Target, options: Options) -> str:
    if to == "shardkit":
        raise RequestError(f"{place.path} is a shardkit checkpoint already; copy the folder")
    for option, given in (("--step", options.step), ("--optimizer", options.optimizer)):
        if given is not None:
            raise RequestError(
                f"{option} is for checkpoints of other libraries; {place.path} says its own, leave it out"
            )
    manifest = place.manifest()
    verify_files(place.storage, place.name, manifest, manifest.files)
    source = source_of(place.storage, place.name, manifest)
    return _write(manifest, source, out, to, options)


def _from_foreign(foreign: Foreign, out: str, to: Target, options: Options, say: Say) -> str:
    if foreign.kind != "dcp" and not options.trust:
        raise RequestError(
            f"{foreign.folder} is a DeepSpeed checkpoint, and its files are pickles: opening them can run code of "
            "whoever made them. If you made it, or trust who did, add --trust"
        )
    # Beside the result: it takes as much room.
    above = split(out)[0]
    room = Path(above) if is_local(above) else None
    if room is not None:
        room.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{STAGING}convert-", dir=room))
    try:
        imported = _read(foreign, scratch / "opened", options)
        for note in imported.notes:
            say(note)
        if to == "shardkit":
            return _write_shardkit(imported, out, options, say)
        inner = _write_shardkit(imported, str(scratch / "checkpoint"), options, say)
        place = one(inner)
        manifest = place.manifest()
        return _write(manifest, source_of(place.storage, place.name, manifest), out, to, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read(foreign: Foreign, scratch: Path, options: Options) -> Imported:
    try:
        if foreign.kind == "dcp":
            return dcp.read(foreign.folder, scratch, trust=options.trust)
        return (zero if foreign.kind == "zero" else universal).read(foreign.folder, scratch)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{foreign.folder} is not laid out as this shardkit knows it ({type(error).__name__}: {error}); files of "
            "several saves or of another version of the library may be mixed"
        ) from error


def _write_shardkit(imported: Imported, out: str, options: Options, say: Say) -> str:
    step = options.step if options.step is not None else imported.step
    if step is None:
        raise RequestError("the checkpoint does not say of which step it is; name it with --step N")
    above, name = split(out)
    named = _STEP.fullmatch(name)
    if named is None:
        above, name = out, step_name(step)
    elif int(named[1]) != step:
        raise RequestError(
            f"{out} is named for another step: the checkpoint is of step {step}; name it {step_name(step)}"
        )
    optimizer, notes = optimizer_class(imported, options.optimizer)
    for note in notes:
        say(note)
    storage = reach(above)
    if name in storage.names():
        raise RequestError(f"{join(above, name)} is there already, and nothing is overwritten; remove it first")

    def write(staging: str) -> None:
        write_imported(storage, staging, imported, step=step, optimizer=optimizer)

    _publish(storage, name, write)
    return join(above, name)


def _write(manifest: Manifest, source: Source, out: str, to: Target, options: Options) -> str:
    if not weights_of(source):
        raise CheckpointError("the checkpoint holds no weights")
    above, name = split(out)
    storage = reach(above)
    storage.make("")
    if to == "safetensors":
        _write_file(storage, name, lambda path: export_weights(source, storage, path, dtype=options.dtype))
    elif to == "hf":
        _publish(
            storage,
            name,
            lambda staging: export_folder(
                source, storage, staging, dtype=options.dtype, max_shard_size=options.max_shard_size
            ),
        )
    elif to == "dcp":
        _publish(storage, name, lambda staging: dcp.write(Path(above) / staging, manifest, source))
    else:
        _publish(storage, name, lambda staging: universal.write(Path(above) / staging, manifest, source))
    return out


def _write_file(storage: Storage, name: str, write: Callable[[str], object]) -> None:
    """A file that appears under its name when all of it is there."""
    part = f"{STAGING}{secrets.token_hex(4)}-{name}"
    try:
        write(part)
        storage.rename(part, name)
    except BaseException:
        with suppress(OSError):
            storage.remove(part)
        raise


def _publish(storage: Storage, name: str, write: Callable[[str], object]) -> None:
    """A folder that appears under its name when all of it is there."""
    staging = storage.staging(name, secrets.token_hex(4))
    try:
        storage.make(staging)
        write(staging)
        storage.publish(staging, name)
    except BaseException:
        with suppress(OSError):
            storage.abandon(staging, name)
        raise
