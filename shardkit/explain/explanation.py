"""What a recipe comes to on one backend, as data; and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

UNTOLD = ("name", "run_dir", "metrics", "launch.profile", "launch.timeout_seconds", "backend.name", "backend.adapter")
# Settings that change no number of a run.


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of one setting of the recipe."""

    key: str
    value: Any
    place: str
    # Where it is given.
    how: Literal["consumed", "translated", "refused"]
    into: str
    # By what it is consumed, into what it is translated, or the sentence that refuses it.


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The effective meaning of a recipe on one backend and number of ranks."""

    backend: str
    adapter: str
    world_size: int
    device: str
    accumulation: int
    # Micro-steps in a full window.
    sections: Mapping[str, Any]
    # Section -> text, or key -> text, number or list; empty where the backend is not installed.
    settings: tuple[Fate, ...]
    recipe: Mapping[str, Any]
    # Dotted key -> value of every setting, defaults included.

    @property
    def refused(self) -> tuple[Fate, ...]:
        return tuple(fate for fate in self.settings if fate.how == "refused")

    def to_json(self) -> dict[str, Any]:
        """What `json.dumps` takes; the keys are stable."""
        return {
            "backend": self.backend,
            "adapter": self.adapter,
            "world_size": self.world_size,
            "device": self.device,
            "accumulation": self.accumulation,
            **self.sections,
            "settings": [asdict(fate) for fate in self.settings],
        }

    def flat(self) -> dict[str, Any]:
        """Dotted key -> value of everything that is said, without the settings."""
        said = {key: value for key, value in self.to_json().items() if key != "settings"}
        return dict(leaves(said))


def differences(a: Explanation, b: Explanation) -> list[tuple[str, Any, Any]]:
    """(key, of a, of b) of all that differs: what settings come to, then "recipe.KEY" of the settings themselves.

    A side that does not say something has None there. Names, folders and what is only shown are left out.
    """
    ours, theirs = a.flat(), b.flat()
    found = [
        (key, ours.get(key), theirs.get(key))
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    ]
    keys = [key for key in dict.fromkeys([*a.recipe, *b.recipe]) if not _untold(key)]
    found += [
        (f"recipe.{key}", a.recipe.get(key), b.recipe.get(key))
        for key in keys
        if a.recipe.get(key) != b.recipe.get(key)
    ]
    return found


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what is no mapping, or an empty one."""
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _untold(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in UNTOLD)
