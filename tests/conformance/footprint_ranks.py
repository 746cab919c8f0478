"""A model of odd sizes whose memory is counted while it trains; the run, and what was predicted of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, WORDS, LENGTH = 37, 11, 47


class Tokens(torch.utils.data.Dataset[Any]):
    """(tokens, targets), the same every time."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, WORDS, (LENGTH + 1,), generator=made)
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)
        self.up = nn.Linear(WIDTH, WIDTH + 4)
        self.down = nn.Linear(WIDTH + 4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Odd(nn.Module):
    """Nothing divides by 2, 3 or 4; a frozen norm, buffers, tied weights, a parameter without a dim."""

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        # What shards takes no parameter without a dim.
        self.gain = nn.Parameter(torch.ones(() if scalar else (1,)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].norm.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


def train_measured(recipe: str, runs: dict[str, list[str]], folder: str) -> dict[str, list[dict[str, int]]]:
    """Train a recipe with each of some overrides; what memory.json says of each rank, on rank 0."""
    import json

    from tests.conformance.run_ranks import run_recipe

    measured = {}
    for name, overrides in runs.items():
        place = Path(folder, name)
        run_recipe(recipe, overrides, str(place))
        memory = place / "memory.json"
        if torch.distributed.get_rank() == 0:
            measured[name] = json.loads(memory.read_text())["ranks"]
    return measured
