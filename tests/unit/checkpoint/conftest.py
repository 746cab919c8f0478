"""Small checkpoints of one process to look at, compare and convert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.checkpoint.save import content_of, write_checkpoint
from shardkit.checkpoint.storage import open_storage
from tests.unit.checkpoint.nets import trained


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save(step=3, seed=0, root="checkpoints")`: the folder of a checkpoint of a `Net` after so many steps."""

    def make(step: int = 3, seed: int = 0, root: str = "checkpoints", training: dict[str, Any] | None = None) -> Path:
        _, engine = trained(step, seed)
        storage = open_storage(str(tmp_path / root))
        storage.make("")
        position = training or {"step": step, "epoch": 0, "samples": step * 6, "normalization": {"policy": "keep"}}
        content = content_of(engine, step=step, training=position)
        return tmp_path / root / write_checkpoint(storage, content, engine.world)

    return make
