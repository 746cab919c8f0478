"""The settings two arms do not share, from their resolved recipes and from what these come to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.compare.results import Arm

# Where a run writes, what it keeps and shows: never why two curves differ.
UNTOLD = ("run_dir", "name", "metrics", "checkpoint.folder", "launch.timeout_seconds")
# The weights that a comparison has made for all its arms: as if each had made them itself.
SEED = re.compile(r"(^|/)seed-[0-9a-f]{12}\.safetensors$")
UNSEEDED = {"init_from": None, "load.strict": True, "load.cast": False}
# What an explanation says of the recipe again, or what has a table of its own.
FOLLOWING = ("communication", "recomputed", "settings", "backend", "adapter", "world_size")
ABSENT = "-"
EXPLAINED = "explain: "


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that two arms do not share."""

    key: str
    # Of the recipe, or `explain: ...` for what it comes to.
    reference: str
    arm: str


def differences(reference: Arm, arm: Arm) -> list[Setting]:
    """Every setting that is not the same, those of the recipe first."""
    ours, theirs = facts(reference), facts(arm)
    keys = dict.fromkeys([*ours, *theirs])
    if reference.explanation is None or arm.explanation is None:
        # What one of them does not say is no difference.
        keys = [key for key in keys if not key.startswith(EXPLAINED)]
    return [
        Setting(key=key, reference=ours.get(key, ABSENT), arm=theirs.get(key, ABSENT))
        for key in keys
        if ours.get(key, ABSENT) != theirs.get(key, ABSENT)
    ]


def facts(arm: Arm) -> dict[str, str]:
    """Every setting of an arm by its dotted key, as text."""
    recipe = {key: value for key, value in _leaves(arm.recipe, "") if not key.startswith(UNTOLD)}
    if SEED.search(str(recipe.get("init_from"))):
        recipe |= UNSEEDED
    # `auto` is what the run made of it.
    worlds = {run.environment["world_size"] for run in arm.runs if run.environment.get("world_size")}
    if worlds:
        recipe["world size"] = ", ".join(str(size) for size in sorted(worlds))
    told = {key: value for key, value in (arm.explanation or {}).items() if not key.startswith(FOLLOWING)}
    explained = dict(_leaves(told, EXPLAINED))
    return {key: _text(value) for key, value in {**recipe, **explained}.items()}


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _leaves(each, f"{key}{name}" if not key or key.endswith(": ") else f"{key}.{name}")
    else:
        yield key, value


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(_text(each) for each in value) if isinstance(value, list) else str(value)
