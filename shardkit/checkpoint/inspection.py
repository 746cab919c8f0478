"""Inspection: what a checkpoint is and holds, from its manifest alone; and whether its files are whole."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.checkpoint.difference import flattened
from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.manifest import Entry, Key, Manifest, shown
from shardkit.checkpoint.place import Place
from shardkit.checkpoint.storage import MANIFEST
from shardkit.checkpoint.tensors import DTYPES
from shardkit.checkpoint.verification import verify_file
from shardkit.errors import CheckpointError

WIDTH = 100
_KINDS = ("parameter", "buffer", "weight", "optimizer", "rng")
# Long, and told in other ways.
_LEFT_OUT = {"recipe", "normalization"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a checkpoint's files are those that were written."""

    place: Place
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: tuple[str, ...] = ()
    # Why, file by file.
    unknown: tuple[str, ...] = field(default=())
    # Files its manifest does not name.


def verify(place: Place) -> Verdict:
    """Read all of a checkpoint's files again; every one that is damaged is named."""
    begin = time.monotonic()
    try:
        manifest = place.manifest()
    except CheckpointError as error:
        return Verdict(place=place, damaged=(str(error),))
    damaged = []
    for file in manifest.files:
        try:
            verify_file(place.storage, place.name, manifest, file)
        except CheckpointError as error:
            damaged.append(str(error))
    return Verdict(
        place=place,
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files.values()),
        seconds=time.monotonic() - begin,
        damaged=tuple(damaged),
        unknown=tuple(n for n in place.storage.names(place.name) if n not in manifest.files and n != MANIFEST),
    )


def verdict_text(verdict: Verdict) -> str:
    """The verdict in a line, and one for each damaged file."""
    if verdict.damaged:
        return "\n".join([f"{verdict.place.path}: damaged", *(f"  {why}" for why in verdict.damaged)])
    files = f"{verdict.files} file" + ("s" if verdict.files != 1 else "")
    text = f"{verdict.place.path}: ok, {files}, {amount(verdict.bytes)} in {verdict.seconds:.1f} s"
    return text + (f" (not of it: {', '.join(verdict.unknown)})" if verdict.unknown else "")


def as_json(place: Place, manifest: Manifest, *, tensors: bool = False) -> dict[str, Any]:
    """What `inspect --json` prints of a checkpoint."""
    found: dict[str, Any] = {
        "path": place.path,
        "step": manifest.step,
        "created": manifest.created,
        "backend": manifest.backend,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "files": {name: {"bytes": file.bytes, "crc32": file.crc32} for name, file in manifest.files.items()},
        "contents": [
            {"kind": kind, "dtype": dtype, "tensors": count, "elements": elements, "bytes": size}
            for kind, dtype, count, elements, size in _contents(manifest)
        ],
        "aliases": dict(manifest.aliases),
        "optimizer": manifest.optimizer or None,
        "groups": [{"parameters": list(group["parameters"]), "options": group["options"]} for group in manifest.groups],
        "training": dict(manifest.training),
    }
    if tensors:
        found["tensors"] = [
            {
                "kind": kind,
                "name": name,
                "state": state,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "files": sorted({chunk.file for chunk in entry.chunks}),
            }
            for (kind, name, state), entry in manifest.entries.items()
        ]
    return found


def as_text(place: Place, manifest: Manifest, *, tensors: bool = False) -> str:
    """What `inspect` prints of one checkpoint: lines of at most 100 columns."""
    total = sum(file.bytes for file in manifest.files.values())
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    ranks = f"{manifest.world_size} rank" + ("s" if manifest.world_size != 1 else "")
    lines = [
        place.path,
        f"  step {manifest.step}, saved {manifest.created}, {manifest.backend} on {ranks}, {amount(total)}",
        *_wrapped(f"  versions: {versions}"),
        "",
        f"  {'kind':<10} {'dtype':<8} {'tensors':>8} {'elements':>16} {'bytes':>12}",
    ]
    for kind, dtype, count, elements, size in _contents(manifest):
        lines.append(f"  {kind:<10} {dtype:<8} {count:>8} {elements:>16,} {amount(size):>12}")
    if manifest.aliases:
        tied = [f"{alias} = {name}" for alias, name in manifest.aliases.items()]
        lines += _wrapped(f"  tied: {', '.join(tied[:6])}{' and more' if len(tied) > 6 else ''}")
    lines += ["", *_optimizer(manifest), "", *_training(manifest.training)]
    lines += ["", f"  {'file':<48} {'bytes':>16}  crc32"]
    lines += [f"  {_fit(name, 48):<48} {file.bytes:>16,}  {file.crc32}" for name, file in manifest.files.items()]
    if tensors:
        lines += ["", f"  {'tensor':<62} {'dtype':<8} shape"]
        for key, entry in manifest.entries.items():
            shape = "x".join(map(str, entry.shape)) or "scalar"
            lines.append(f"  {_fit(shown(key), 62):<62} {entry.dtype:<8} {_fit(shape, 26)}")
    return "\n".join(lines)


def overview(places: Sequence[Place]) -> tuple[str, list[dict[str, Any]], bool]:
    """A line a checkpoint, the same as JSON, and whether one of them cannot be read."""
    lines = [f"{'step':>10}  {'saved':<20}  {'backend':<18} {'ranks':>5}  {'size':>10}  path"]
    rows: list[dict[str, Any]] = []
    broken = False
    for place in places:
        try:
            manifest = place.manifest()
        except CheckpointError as error:
            broken = True
            lines.append(f"{place.name.removeprefix('step-').lstrip('0') or '0':>10}  damaged: {error}")
            rows.append({"path": place.path, "damaged": str(error)})
            continue
        total = sum(file.bytes for file in manifest.files.values())
        lines.append(
            f"{manifest.step:>10}  {manifest.created:<20}  {_fit(manifest.backend, 18):<18} {manifest.world_size:>5}  "
            f"{amount(total):>10}  {_fit(place.path, 27)}"
        )
        rows.append(as_json(place, manifest))
    return "\n".join(lines), rows, broken


def amount(size: int) -> str:
    """Bytes as people read them."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _contents(manifest: Manifest) -> list[tuple[str, str, int, int, int]]:
    """(kind or optimizer state, dtype, tensors, elements, bytes)."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for key, entry in sorted(manifest.entries.items(), key=lambda item: _order(item[0])):
        found.setdefault((key[2] or key[0] if key[0] == "optimizer" else key[0], entry.dtype), []).append(entry)
    return [
        (kind, dtype, len(entries), (count := sum(e.numel for e in entries)), count * DTYPES[dtype].itemsize)
        for (kind, dtype), entries in found.items()
    ]


def _order(key: Key) -> tuple[int, str]:
    return (_KINDS.index(key[0]) if key[0] in _KINDS else len(_KINDS), key[2] or "")


def _optimizer(manifest: Manifest) -> Iterable[str]:
    if not manifest.optimizer and not manifest.groups:
        return ["  no optimizer"]
    lines = [f"  optimizer {manifest.optimizer}"]
    for index, group in enumerate(manifest.groups):
        options = ", ".join(f"{key}={_brief(value)}" for key, value in decode(group["options"]).items())
        lines += _wrapped(f"  group {index}: {len(group['parameters'])} parameters, {options}")
    return lines


def _training(training: Mapping[str, Any]) -> Iterable[str]:
    """The training position and whatever else is there, and the norms' policy."""
    if not training:
        return ["  no training position"]
    lines = ["  training"]
    norms = training.get("normalization")
    if isinstance(norms, Mapping) and "policy" in norms:
        lines.append(f"    normalization.policy: {norms['policy']}")
    for key, value in flattened(decode({k: v for k, v in training.items() if k not in _LEFT_OUT})).items():
        lines.append(f"    {_fit(key, 40)}: {_fit(_brief(value), 52)}")
    return lines


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _wrapped(text: str) -> list[str]:
    """A long line in several, each at most 100 columns."""
    lines = []
    while len(text) > WIDTH:
        cut = text.rfind(" ", 8, WIDTH)
        cut = cut if cut > 0 else WIDTH
        lines.append(text[:cut].rstrip())
        text = f"    {text[cut:].lstrip()}"
    return [*lines, text]


def _fit(text: str, width: int) -> str:
    """A long text keeps its end, which tells more of a name."""
    return text if len(text) <= width else f"...{text[3 - width :]}"
