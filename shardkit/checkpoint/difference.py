"""The difference of two checkpoints, element by element, whatever backends and ranks they were saved on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.manifest import Entry, Key, Manifest, shown
from shardkit.checkpoint.place import Place
from shardkit.checkpoint.source import Source, source_of
from shardkit.checkpoint.tensors import DTYPES

PIECE = 2**18
# Elements that are compared at once.
# Training facts that say where a checkpoint was made, not what it is.
_INCIDENTAL = {"recipe", "imported"}
# Of these, what does not depend on the ranks.
_ESSENTIAL = {"random": "seed", "normalization": "policy"}


@dataclass(frozen=True, kw_only=True)
class Differing:
    """A tensor of both that is not the same in both."""

    key: Key
    why: str = ""
    # Shapes or dtypes; empty = elements.
    absolute: float = 0.0
    # The largest difference of two elements,
    relative: float = 0.0
    # and the largest by the larger of the two.
    elements: int = 0
    # How many differ.


@dataclass(kw_only=True)
class Difference:
    """What is not the same in A and B."""

    only_a: list[Key] = field(default_factory=list)
    only_b: list[Key] = field(default_factory=list)
    tensors: list[Differing] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    compared: int = 0
    # Tensors of both.

    @property
    def any(self) -> bool:
        return bool(self.only_a or self.only_b or self.tensors or self.numbers or self.groups or self.training)


def difference(a: Place, b: Place, tolerance: float = 0.0) -> Difference:
    """Compare two checkpoints, a few MiB at a time.

    Args:
        a: one.
        b: the other.
        tolerance: elements and numbers that are no further apart are the same.

    Raises:
        CheckpointError: one is damaged.
    """
    first, second = a.manifest(), b.manifest()
    found = Difference()
    one, other = source_of(a.storage, a.name, first), source_of(b.storage, b.name, second)
    left, right = _named(first), _named(second)
    found.only_a = [key for key in left if key not in right]
    found.only_b = [key for key in right if key not in left]
    for key in left:
        if key in right:
            found.compared += 1
            differing = _tensor(one, left[key], other, right[key], key, tolerance)
            if differing is not None:
                found.tensors.append(differing)
    found.numbers = _numbers(first, second, tolerance)
    found.groups = _groups(first, second)
    found.training = _training(first, second)
    return found


def _named(manifest: Manifest) -> dict[Key, Key]:
    """Its tensors by a key that is the same in every checkpoint; tied ones under the first of their names.

    Random streams belong to the ranks of one run, not to the state that moves between worlds.
    """
    return {_common(manifest, key): key for key in manifest.entries if key[0] != "rng"}


def _common(manifest: Manifest, key: Key) -> Key:
    kind, name, state = key
    names = [name, *(alias for alias, kept in manifest.aliases.items() if kept == name)]
    # A kind that another library did not tell.
    return (kind if kind == "optimizer" else "weight", min(names), state)


def _tensor(a: Source, key_a: Key, b: Source, key_b: Key, key: Key, tolerance: float) -> Differing | None:
    first, second = a.entries[key_a], b.entries[key_b]
    shown_key = key_a if key[0] == "weight" else key
    if first.shape != second.shape:
        return Differing(key=shown_key, why=f"{list(first.shape)} in A, {list(second.shape)} in B")
    why = f"{first.dtype} in A, {second.dtype} in B" if first.dtype != second.dtype and not tolerance else ""
    absolute, relative, count = _compared(a, key_a, first, b, key_b, second, tolerance)
    if not count and not why:
        return None
    return Differing(key=shown_key, why=why, absolute=absolute, relative=relative, elements=count)


def _compared(
    a: Source, key_a: Key, first: Entry, b: Source, key_b: Key, second: Entry, tolerance: float
) -> tuple[float, float, int]:
    absolute = relative = 0.0
    count = 0
    for start in range(0, first.numel, PIECE):
        length = min(PIECE, first.numel - start)
        x = torch.empty(length, dtype=DTYPES[first.dtype])
        y = torch.empty(length, dtype=DTYPES[second.dtype])
        a.read(key_a, start, x)
        b.read(key_b, start, y)
        same, gap, larger = _gap(x, y)
        apart = ~same & (gap > tolerance) if tolerance else ~same
        if bool(apart.any()):
            count += int(apart.sum())
            absolute = max(absolute, float(gap.max()))
            relative = max(relative, float(torch.where(gap == 0, gap, gap / larger).nan_to_num(nan=math.inf).max()))
    return absolute, relative, count


def _gap(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where two tensors are the same, how far apart they are, and the size of the larger one."""
    wide = torch.complex128 if x.dtype.is_complex or y.dtype.is_complex else torch.float64
    a, b = x.to(wide), y.to(wide)
    # Whole numbers beyond 2**53 are not told apart in fp64.
    integers = not (x.dtype.is_floating_point or x.dtype.is_complex) and x.dtype == y.dtype
    same = (x == y if integers else a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs()
    gap = torch.where(gap.isnan(), torch.full_like(gap, math.inf), gap)
    return same, torch.where(same, torch.zeros_like(gap), gap), torch.maximum(a.abs(), b.abs())


def _numbers(a: Manifest, b: Manifest, tolerance: float) -> list[str]:
    """What the optimizer counts for each parameter; the same difference of many parameters is told once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    first = {_common(a, ("optimizer", name, None))[1]: values for name, values in a.numbers.items()}
    second = {_common(b, ("optimizer", name, None))[1]: values for name, values in b.numbers.items()}
    for name in {**first, **second}:
        x, y = decode(first.get(name, {})), decode(second.get(name, {}))
        for key in {**x, **y}:
            if not _same(x.get(key), y.get(key), tolerance):
                found.setdefault((key, _brief(x.get(key)), _brief(y.get(key))), []).append(name)
    return [f"{key} of {_first(names)}: {x} in A, {y} in B" for (key, x, y), names in found.items()]


def _groups(a: Manifest, b: Manifest) -> list[str]:
    """Parameter groups follow the parameters, in whatever order they are."""
    if a.optimizer != b.optimizer:
        return [f"optimizer: {a.optimizer or 'none'} in A, {b.optimizer or 'none'} in B"]
    first, second = _options(a), _options(b)
    found: dict[str, list[str]] = {}
    for name in {**first, **second}:
        x, y = first.get(name), second.get(name)
        if x is None or y is None:
            found.setdefault(f"in a parameter group only in {'B' if x is None else 'A'}", []).append(name)
            continue
        for key in {**x, **y}:
            if not _same(x.get(key), y.get(key), 0.0):
                found.setdefault(f"{key}: {_brief(x.get(key))} in A, {_brief(y.get(key))} in B", []).append(name)
    return [f"{_first(names)}: {what}" for what, names in found.items()]


def _first(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _options(manifest: Manifest) -> dict[str, dict[str, Any]]:
    return {
        _common(manifest, ("optimizer", name, None))[1]: decode(group["options"])
        for group in manifest.groups
        for name in group["parameters"]
    }


def _training(a: Manifest, b: Manifest) -> list[str]:
    x, y = flattened(decode(_essential(a))), flattened(decode(_essential(b)))
    return [
        f"{key}: {_brief(x.get(key))} in A, {_brief(y.get(key))} in B"
        for key in {**x, **y}
        if not _same(x.get(key), y.get(key), 0.0)
    ]


def _essential(manifest: Manifest) -> dict[str, Any]:
    found = {"step": manifest.step, **{k: v for k, v in manifest.training.items() if k not in _INCIDENTAL}}
    for key, inner in _ESSENTIAL.items():
        if isinstance(found.get(key), Mapping):
            found[key] = {inner: found[key].get(inner)}
    return found


def flattened(value: Any, key: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by dotted name."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    found: dict[str, Any] = {}
    for inner, each in value.items():
        found |= flattened(each, f"{key}.{inner}" if key else str(inner))
    return found


def _same(x: Any, y: Any, tolerance: float) -> bool:
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        if isinstance(x, bool | int | float | torch.Tensor) and isinstance(y, bool | int | float | torch.Tensor):
            x, y = torch.as_tensor(x), torch.as_tensor(y)
            return x.shape == y.shape and bool(((x.double() - y.double()).abs() <= tolerance).all())
        return False
    if isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y):
        return True
    if tolerance and isinstance(x, int | float) and isinstance(y, int | float):
        return abs(x - y) <= tolerance
    return bool(x == y)


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, float):
        return f"{value:g}"
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_json(found: Difference, tolerance: float) -> dict[str, Any]:
    """The difference as what json.dumps takes."""
    return {
        "equal": not found.any,
        "tolerance": tolerance,
        "compared": found.compared,
        "only_in_a": [_shown(key) for key in found.only_a],
        "only_in_b": [_shown(key) for key in found.only_b],
        "tensors": [
            {
                "name": shown(each.key),
                "why": each.why or None,
                "largest_absolute": _finite(each.absolute),
                "largest_relative": _finite(each.relative),
                "elements": each.elements,
            }
            for each in found.tensors
        ],
        "numbers": found.numbers,
        "groups": found.groups,
        "training": found.training,
    }


def as_text(found: Difference, tolerance: float) -> str:
    """The difference in lines of at most 100 columns."""
    if not found.any:
        within = f" within {tolerance:g}" if tolerance else ""
        return f"equal{within}: {found.compared} tensors, the optimizer's numbers and groups, and the position"
    lines = []
    for where, keys in (("A", found.only_a), ("B", found.only_b)):
        if keys:
            lines += [f"only in {where}: {len(keys)}", *(f"  {_fit(_shown(key), 96)}" for key in keys)]
    if found.tensors:
        lines.append(f"tensors that differ: {len(found.tensors)} of {found.compared}")
        lines.append(f"  {'':<52} {'largest':>10} {'relative':>10} {'elements':>12}")
        for each in sorted(found.tensors, key=lambda each: (each.why == "", -each.absolute)):
            if each.why and not each.elements:
                lines.append(f"  {_fit(shown(each.key), 52):<52} {each.why}")
                continue
            numbers = f"{each.absolute:>10.3g} {each.relative:>10.3g} {each.elements:>12}"
            lines.append(f"  {_fit(shown(each.key), 52):<52} {numbers}" + (f"  {each.why}" if each.why else ""))
    for title, entries in (
        ("optimizer numbers that differ", found.numbers),
        ("parameter groups that differ", found.groups),
        ("training state that differs", found.training),
    ):
        if entries:
            lines += [f"{title}:", *(f"  {_fit(entry, 96)}" for entry in entries)]
    return "\n".join(lines)


def _shown(key: Key) -> str:
    return shown(("parameter", key[1], key[2])) if key[0] == "weight" else shown(key)


def _fit(text: str, width: int) -> str:
    """A long name keeps its end, which tells more."""
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)
