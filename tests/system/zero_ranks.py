"""What the ranks of test_convert.py run: an engine of DeepSpeed's that saves and loads as DeepSpeed does."""

from __future__ import annotations

from typing import Any

import torch

import shardkit
from shardkit.checkpoint.save import content_of, write_checkpoint
from shardkit.checkpoint.storage import open_storage
from shardkit.engines import deepspeed as adapter

STEPS = 3


class Net(torch.nn.Module):
    """Odd sizes, a parameter smaller than the world, a BatchNorm, a frozen parameter and a tied pair."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(13, 37)
        self.norm = torch.nn.BatchNorm1d(37)
        self.second = torch.nn.Linear(37, 13)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(13, 37, bias=False)
        self.head.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.norm(self.first(x)))) * self.scale * self.frozen.sum()


def grouped(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    decayed = {"first.weight", "second.weight"}
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if name in decayed], "weight_decay": 0.1},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


def opened(stage: int, options: dict[str, Any], seed: int = 0, more: dict[str, Any] | None = None) -> Any:
    config = adapter.zero_config
    # What shardkit's adapter has no option for.
    adapter.zero_config = lambda *given: {**config(*given), **(more or {})}
    backend = {"adapter": "deepspeed", "options": {"stage": stage, **options}}
    return shardkit.open_engine(backend, Net(seed), grouped, micro_batch_size=4)


def save(stage: int, folder: str, options: dict[str, Any]) -> None:
    """Train a few steps, then save as shardkit does and as DeepSpeed does."""
    engine = opened(stage, options)
    torch.manual_seed(engine.world.rank)
    for _ in range(STEPS):
        engine.backward(engine.model(torch.randn(4, 13)).square().mean())
        engine.step()
    storage = open_storage(f"{folder}/own")
    if engine.world.rank == 0:
        storage.make("")
    write_checkpoint(storage, content_of(engine, step=STEPS, training={"step": STEPS}), engine.world)
    engine.model.save_checkpoint(f"{folder}/deepspeed", client_state={"epoch": 1})


def load_universal(stage: int, folder: str) -> list[tuple[Any, ...]]:
    """What this rank holds after DeepSpeed loaded a universal folder into a net of other weights."""
    engine = opened(stage, {}, seed=7, more={"checkpoint": {"load_universal": True}})
    path, _ = engine.model.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert path is not None
    return [(i.kind, i.name, i.state, i.start, i.tensor.clone()) for i in engine.state()]
