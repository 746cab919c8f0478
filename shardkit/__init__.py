"""shardkit: the same PyTorch training run, unchanged, on any sharding backend, and proven equal."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

# Imported on first use, so that `import shardkit` costs nothing and does not import torch.
_PUBLIC = {
    "Engine": "shardkit.engines.api",
    "StepReport": "shardkit.engines.api",
    "Traits": "shardkit.engines.api",
    "MicroBatch": "shardkit.data.loader",
    "Window": "shardkit.window",
    "World": "shardkit.world",
    "join": "shardkit.world",
    "load_checkpoint": "shardkit.checkpoint.own_loop",
    "save_checkpoint": "shardkit.checkpoint.own_loop",
    "WindowReport": "shardkit.window",
    "open_engine": "shardkit.engines.opening",
    "train_step": "shardkit.window",
    "CheckpointError": "shardkit.errors",
    "ShardkitError": "shardkit.errors",
}

__all__ = [
    "CheckpointError",
    "Engine",
    "MicroBatch",
    "ShardkitError",
    "StepReport",
    "Traits",
    "Window",
    "WindowReport",
    "World",
    "__version__",
    "join",
    "load_checkpoint",
    "open_engine",
    "save_checkpoint",
    "train_step",
]

if TYPE_CHECKING:
    from shardkit.checkpoint.own_loop import load_checkpoint, save_checkpoint
    from shardkit.data.loader import MicroBatch
    from shardkit.engines.api import Engine, StepReport, Traits
    from shardkit.engines.opening import open_engine
    from shardkit.errors import CheckpointError, ShardkitError
    from shardkit.window import Window, WindowReport, train_step
    from shardkit.world import World, join


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
