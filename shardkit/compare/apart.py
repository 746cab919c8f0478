"""How far two states are apart: one number a tensor, read from checkpoints a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardkit.checkpoint.history import steps
from shardkit.checkpoint.manifest import Key, Manifest, read
from shardkit.checkpoint.source import Source, source_of
from shardkit.checkpoint.storage import open_storage

PIECE = 2**20
# Elements that are compared at once.


@dataclass(frozen=True, kw_only=True)
class State:
    """The tensors of one checkpoint."""

    source: Source
    manifest: Manifest

    def names(self, kind: str) -> list[str]:
        """Of a kind, in the model's order."""
        return [name for key_kind, name, state in self.source.entries if key_kind == kind and state is None]


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far one tensor is from the reference's."""

    name: str
    difference: float
    # ||a - b||, the 2-norm over all elements.
    error: float
    # ||a - b|| / ||b - start||: relative to what training has changed, or to the tensor itself where there is no
    # start. 0 where both are equal; infinite where only one is finite.


def read_state(folder: Path, step: int) -> State:
    """The state after `step` of the run in `folder`."""
    storage = open_storage(str(folder / "checkpoints"))
    name = next(name for number, name in steps(storage) if number == step)
    manifest = read(storage, name)
    return State(source=source_of(storage, name, manifest), manifest=manifest)


def apart(arm: State, reference: State, start: Source | None, kind: str) -> list[Apart]:
    """Every tensor of a kind, in the reference's order; what only one of them has is infinitely far.

    Args:
        arm: a state.
        reference: what it is compared with.
        start: the weights both began with; None = compare with the tensor itself.
        kind: "parameter" or "buffer".
    """
    found = []
    for name in reference.names(kind):
        key: Key = (kind, name, None)
        if arm.source.find(key) is None or arm.source.find(key).shape != reference.source.entries[key].shape:  # type: ignore[union-attr]
            found.append(Apart(name=name, difference=float("inf"), error=float("inf")))
            continue
        found.append(_apart(key, arm.source, reference.source, start))
    return found


def moved(state: State, start: Source | None) -> dict[str, float]:
    """Parameter -> root mean square of what training has changed in it; of the parameter itself without a start."""
    found = {}
    for name in state.names("parameter"):
        key: Key = ("parameter", name, None)
        numel = state.source.entries[key].numel
        total = sum(float((b - zero).square().sum()) for _, b, zero in _pieces(key, state.source, state.source, start))
        found[name] = (total / max(1, numel)) ** 0.5
    return found


def _apart(key: Key, arm: Source, reference: Source, start: Source | None) -> Apart:
    difference = changed = 0.0
    for a, b, zero in _pieces(key, arm, reference, start):
        difference += float((a - b).square().sum())
        changed += float((b - zero).square().sum())
    if difference == 0.0:
        return Apart(name=key[1], difference=0.0, error=0.0)
    error = (difference / changed) ** 0.5 if changed else float("inf")
    return Apart(name=key[1], difference=_finite(difference**0.5), error=_finite(error))


def _finite(value: float) -> float:
    return value if value == value else float("inf")


def _pieces(
    key: Key, arm: Source, reference: Source, start: Source | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    numel = reference.entries[key].numel
    for first in range(0, numel, PIECE):
        length = min(PIECE, numel - first)
        a, b, zero = (torch.zeros(length, dtype=torch.float64) for _ in range(3))
        arm.read(key, first, a)
        reference.read(key, first, b)
        if start is not None and start.find(key) is not None:
            start.read(key, first, zero)
        yield a, b, zero
