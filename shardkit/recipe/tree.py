"""A document as written: leaves, sections and lists, each with its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Key = tuple[str | int, ...]  # ("parameter_groups", 0, "match")


@dataclass
class Leaf:
    """One value: text as written, or (kind "value") what an interpolation gave."""

    place: str
    value: Any
    kind: Literal["plain", "quoted", "value", "broken"] = "value"
    # broken = it has a problem already; nothing more is said about it.

    @property
    def empty(self) -> bool:
        """Nothing is written after the key."""
        return self.kind == "plain" and not self.value

    @property
    def sound(self) -> bool:
        """It is there to be read: given, without a problem and without an interpolation."""
        return self.kind != "broken" and self.value != "???" and not self.refers

    @property
    def refers(self) -> bool:
        """It holds an interpolation that is still to be resolved."""
        return self.kind in ("plain", "quoted") and "${" in self.value


@dataclass
class Section:
    """A mapping; its place is that of its key."""

    place: str
    children: dict[str, Tree] = field(default_factory=dict)


@dataclass
class Items:
    """A list."""

    place: str
    children: list[Tree] = field(default_factory=list)


Tree = Leaf | Section | Items


def dotted(key: Key) -> str:
    """A key as a person writes it."""
    return ".".join(str(part) for part in key)


def entries(value: Any) -> list[tuple[str | int, Any]]:
    """What is directly inside a mapping or a list of plain values, by key or index."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def tree_of(value: Any, place: str) -> Tree:
    """A plain Python value as a tree that stands at one place."""
    if isinstance(value, dict):
        return Section(place, {str(name): tree_of(child, place) for name, child in value.items()})
    if isinstance(value, list):
        return Items(place, [tree_of(child, place) for child in value])
    return Leaf(place, value)
