"""The seed of a comparison: weights that are initialised once, and loaded by every arm that has the same model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from shardkit.recipe.schema import Recipe


def seed_name(recipe: Recipe) -> str | None:
    """The file of a recipe's initial weights, the same for one model and seed; None where the recipe names its own."""
    if recipe.init_from is not None:
        return None
    text = json.dumps([asdict(recipe)["model"], recipe.seed], sort_keys=True, default=str)
    return f"seed-{hashlib.sha256(text.encode()).hexdigest()[:12]}.safetensors"


def write_seed(recipe: Recipe, folder: Path) -> Path | None:
    """Build the model as a rank would, and write its parameters and buffers, unless they are there."""
    name = seed_name(recipe)
    if name is None:
        return None
    path = folder / name
    if not path.exists():
        from shardkit.checkpoint.storage import LocalStorage
        from shardkit.checkpoint.tensors import write_whole
        from shardkit.engines.names import tied_names
        from shardkit.recipe.build import build
        from shardkit.seeds import seed_alike

        seed_alike(recipe.seed)
        model = build(recipe.model)
        tied = tied_names(model)
        tensors = {name: value for name, value in model.state_dict().items() if name not in tied}
        part = f"{name}.part"
        write_whole(LocalStorage(folder), part, tensors)
        (folder / part).replace(path)
    return path


def seeded(path: Path | None) -> tuple[str, ...]:
    """Overrides of a run that begins with these weights, in the dtype that it trains in."""
    return () if path is None else (f"init_from={path}", "load.strict=false", "load.cast=true")
