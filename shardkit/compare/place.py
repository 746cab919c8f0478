"""Where `shardkit check` runs a recipe: a backend and a number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkit.engines.registry import BUILT_IN

REFERENCE = next(name for name, adapter in BUILT_IN.items() if adapter.one_process)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A backend and how many processes."""

    backend: str
    world_size: int
    other: Literal["", "again", "recut"] = ""
    # The reference once more: the same run, or with the windows cut into other micro-batches.

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.world_size}{f'-{self.other}' if self.other else ''}"


WHOLE = Place(backend=REFERENCE, world_size=1)
AGAIN = Place(backend=REFERENCE, world_size=1, other="again")
RECUT = Place(backend=REFERENCE, world_size=1, other="recut")
REFERENCES = (WHOLE, AGAIN, RECUT)
# How far the second is from the first is not deterministic; how far the third is, is rounding, or the model sees how a
# window is cut.
