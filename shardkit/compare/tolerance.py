"""How far two equal runs may be apart at a step: from the rounding of the dtype, and from what was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Relative difference that rounding explains at step t (counted from 1): first * t ** growth, up to most."""

    first: float
    growth: float
    most: float

    def at(self, step: int) -> float:
        return min(self.most, self.first * max(1, step) ** self.growth)
