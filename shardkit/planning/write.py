"""A copy of a recipe with what a plan recommends; its comments and all else stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from shardkit import shipped
from shardkit.engines import registry
from shardkit.engines.swapped import with_backend
from shardkit.errors import RecipeError, RequestError
from shardkit.planning.amount import size
from shardkit.planning.plan import Plan, Row
from shardkit.planning.reason import Reason, named
from shardkit.recipe.backend import load_backend
from shardkit.recipe.editing import NoPlace, edited, plain
from shardkit.recipe.load import Loaded, load
from shardkit.recipe.positions import node_of
from shardkit.recipe.schema import Recipe
from shardkit.recipe.tree import Key

CHOSEN = "chosen by shardkit plan from the model"


def write(
    plan: Plan, reason: Reason, *, recipe: str, overrides: Sequence[str], path: Path, processes: bool = False
) -> str:
    """Write the copy; what to tell about it besides its name, or nothing.

    Args:
        plan: what recommends.
        reason: why; where nothing fits, with the nearest setting that does.
        recipe: path or name of the recipe.
        overrides: `key=value` that the plan was made with, which the copy gets too.
        path: of the copy, where nothing may be.
        processes: also write down how many, on one node.

    Raises:
        RequestError: nothing fits, or there is something at the path.
    """
    row, micro_batch_size = _picked(plan, reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = _target(plan.loaded, row, micro_batch_size, processes=processes)
    head = (
        f"# Planned: {named(row)}, {_needs(row, micro_batch_size)} of {size(row.memory)} a rank, {plan.device.name}.\n"
    )
    try:
        text = head + _edited(_text(recipe), plan.loaded, row, target, overrides)
        kept = _reads_as(text, target, path)
    except NoPlace:
        kept, text = False, ""
    if not kept:
        text = head + Loaded(target, plan.loaded.origins, plan.loaded.path).to_yaml()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(
            f"--write {str(path)!r} is there already, and is not written over; give a new name"
        ) from None
    return "" if kept else "resolved, without the comments: the recipe's text could not be edited"


def _picked(plan: Plan, reason: Reason) -> tuple[Row, int | None]:
    """What is recommended, or what fits with a smaller micro-batch."""
    if plan.recommended is not None:
        return plan.recommended, None
    nearest = reason.nearest
    if nearest is not None and nearest.row is not None:
        return nearest.row, nearest.micro_batch_size
    raise RequestError(f"--write: there is nothing to write. {reason.why}")


def _needs(row: Row, micro_batch_size: int | None) -> str:
    if micro_batch_size is not None:
        return f"micro-batches of {micro_batch_size}, which fit in the {size(row.memory)}"
    return size(row.needs or 0)


def _target(loaded: Loaded, row: Row, micro_batch_size: int | None, *, processes: bool) -> Recipe:
    """The recipe as the copy has to read."""
    recipe, choice = loaded.recipe, row.choice
    backend = with_backend(loaded, choice.backend, where_known=True).recipe.backend
    settings = row.footprint.settings if row.footprint else {}
    backend = replace(backend, options={**backend.options, **choice.options, **settings})
    total = row.micro_batch_size * row.accumulation * choice.world_size
    batch = replace(
        recipe.batch,
        global_batch_size=total if row.note else recipe.batch.global_batch_size,
        micro_batch_size=micro_batch_size or recipe.batch.micro_batch_size,
    )
    changed = replace(recipe, backend=backend, batch=batch)
    if choice.activation_checkpointing is not None:
        changed = replace(changed, activation_checkpointing=choice.activation_checkpointing)
    if processes:
        changed = replace(changed, launch=replace(recipe.launch, nproc_per_node=choice.world_size))
    return changed


def _edited(text: str, loaded: Loaded, row: Row, target: Recipe, overrides: Sequence[str]) -> str:
    recipe = loaded.recipe
    for override in overrides:
        name, _, value = override.partition("=")
        if name.strip().partition(".")[0] != "backend":
            text = edited(text, _key(name), _as_written(value.strip()))
    for key in ("batch.global_batch_size", "batch.micro_batch_size", "launch.nproc_per_node"):
        section, name = key.split(".")
        value = getattr(getattr(target, section), name)
        if value != getattr(getattr(recipe, section), name):
            text = edited(text, (section, name), plain(value))
    if target.activation_checkpointing != recipe.activation_checkpointing:
        text = edited(text, ("activation_checkpointing",), plain(target.activation_checkpointing))
    own = any(override.strip().startswith("backend") for override in overrides)
    if own or target.backend != recipe.backend:
        text = edited(text, ("backend",), *_backend(row, target))
    return text


def _backend(row: Row, target: Recipe) -> tuple[str | Mapping[str, Any], dict[str, str]]:
    """The name of the preset where nothing is over it, else all of it, with comments."""
    backend = target.backend
    preset = load_backend(row.choice.backend, options_of=registry.options_of)
    if preset == backend:
        return plain(row.choice.backend), {}
    chosen = row.footprint.settings if row.footprint else {}
    value = plain({"name": backend.name, "adapter": backend.adapter, "options": backend.options})
    return value, {f"options.{key}": CHOSEN for key in chosen}


def _reads_as(text: str, target: Recipe, path: Path) -> bool:
    """Whether the text, at its place, is the recipe that it has to be."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    try:
        return asdict(load(part, options_of=registry.options_of).recipe) == asdict(target)
    except RecipeError:
        return False
    finally:
        part.unlink()


def _text(recipe: str) -> str:
    path = Path(recipe) if Path(recipe).exists() else shipped.files("recipes")[recipe]
    return path.read_bytes().decode("utf-8-sig")


def _key(name: str) -> Key:
    return tuple(re.sub(r"\[(\d+)\]", r".\1", name.strip()).split("."))


def _as_written(text: str) -> str:
    """A value of a command line as YAML: without brackets or quotes it is one plain text, whatever it holds."""
    if text[:1] in ("[", "{", '"', "'"):
        return text
    try:
        node = node_of(f"v: {text}\n")
    except yaml.YAMLError:
        return json.dumps(text)
    value = node.value[0][1] if isinstance(node, yaml.MappingNode) else None
    return text if isinstance(value, yaml.ScalarNode) and value.value == text else json.dumps(text)
