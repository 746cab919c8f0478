"""A small net with all that a checkpoint has to get right, and runs of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardkit


class Net(nn.Module):
    """Odd sizes, a BatchNorm with its 0-dim counter, a tied pair and a frozen parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(5, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.body = nn.Linear(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.embed(x)))) * self.frozen.sum()


def optimizer_of(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two groups, as they are common: decay for matrices only."""
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


def trained(steps: int = 3, seed: int = 0) -> tuple[Net, Any]:
    """A net after some steps, and its engine."""
    net = Net(seed)
    engine = shardkit.open_engine("single", net, optimizer_of)
    torch.manual_seed(seed + 1)
    for _ in range(steps):
        with engine.micro_step(True):
            engine.backward(net(torch.randn(6, 5)).square().mean())
        engine.step()
    return net, engine
