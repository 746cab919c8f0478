"""What becomes of every setting that a recipe gives: consumed, translated or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardkit.errors import Problem
from shardkit.explain.explanation import Fate, leaves
from shardkit.recipe.load import DEFAULT, Loaded

# Who takes a setting that no adapter translates, by the longest beginning of its key.
_CONSUMERS = {
    "name": "the run folder",
    "seed": "weights, sample order and augmentation streams, on every backend alike",
    "model": "builds the model, before any backend",
    "data": "shardkit's loader; (seed, epoch) decide the order, ranks only cut it",
    "loss": "shardkit's window, which divides by the items of all ranks",
    "optimizer": "builds the optimizer, inside the backend",
    "scheduler": "shardkit, one step an optimizer step",
    "parameter_groups": "the optimizer's groups, by full names",
    "blocks": "sharding units",
    "activation_checkpointing": "blocks that recompute themselves in the backward, whatever backend wraps the model",
    "batch.global_batch_size": "shardkit's window",
    "batch.micro_batch_size": "shardkit's window",
    "train.max_grad_norm": "clipping by the global norm, in the step",
    "train.precision": "autocast and dtypes",
    "train": "shardkit's loop",
    "normalization": "applied to the bare model, before any backend",
    "evaluation": "shardkit's evaluation",
    "checkpoint": "shardkit's checkpoints, the same on every backend",
    "load": "what is loaded of a checkpoint",
    "init_from": "the weights to start with",
    "metrics": "what rank 0 writes",
    "backend.options": "the adapter",
    "backend": "chooses the adapter",
    "launch": "the launcher",
    "run_dir": "the run folder",
}


def values(loaded: Loaded) -> dict[str, Any]:
    """Dotted key -> value of every setting, an empty mapping or list as itself."""
    return dict(leaves(_indexed(asdict(loaded.recipe))))


def fates(loaded: Loaded, translated: Mapping[str, str], refusals: Sequence[Problem]) -> tuple[Fate, ...]:
    """One for each setting that is given or has to be named because it is refused."""
    refused = {problem.key: problem.message for problem in refusals}
    known = values(loaded)
    found = []
    for key, value in known.items():
        place = loaded.origins.get(key, DEFAULT)
        if key in refused:
            found.append(_fate(key, value, place, "refused", refused.pop(key)))
        elif place != DEFAULT and key in translated:
            found.append(_fate(key, value, place, "translated", translated[key]))
        elif place != DEFAULT:
            found.append(_fate(key, value, place, "consumed", _consumer(key)))
    # Sections, and settings that this backend does not know.
    found += [_fate(key, None, loaded.place(key), "refused", message) for key, message in refused.items()]
    return tuple(found)


def _fate(key: str, value: Any, place: str, how: Any, into: str) -> Fate:
    return Fate(key=key, value=value, place=place, how=how, into=into)


def _consumer(key: str) -> str:
    while key not in _CONSUMERS and "." in key:
        key = key.rpartition(".")[0]
    return _CONSUMERS.get(key, "shardkit")


def _indexed(value: Any) -> Any:
    """Lists of mappings as mappings by their numbers, so that each setting in them has a key."""
    if isinstance(value, Mapping):
        return {key: _indexed(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        return {str(index): _indexed(inner) for index, inner in enumerate(value)}
    return value
