"""How far two states are apart: one number a tensor, read from checkpoints a few MiB at a time."""

from __future__ import annotations

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
    error: float
    # ||a - b|| / ||b - start||, 2-norms over all elements: relative to what training has changed, or to the tensor
    # itself where there is no start. 0 where both are equal; infinite where only one is finite.


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
            found.append(Apart(name=name, error=float("inf")))
            continue
        found.append(Apart(name=name, error=_error(key, arm.source, reference.source, start)))
    return found


def _error(key: Key, arm: Source, reference: Source, start: Source | None) -> float:
    numel = reference.entries[key].numel
    begun = start is not None and start.find(key) is not None
    difference = moved = 0.0
    for first in range(0, numel, PIECE):
        length = min(PIECE, numel - first)
        a, b, zero = (torch.zeros(length, dtype=torch.float64) for _ in range(3))
        arm.read(key, first, a)
        reference.read(key, first, b)
        if begun and start is not None:
            start.read(key, first, zero)
        difference += float((a - b).square().sum())
        moved += float((b - zero).square().sum())
    if difference == 0.0:
        return 0.0
    error = (difference / moved) ** 0.5 if moved else float("inf")
    return error if error == error else float("inf")
