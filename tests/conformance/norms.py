"""A deep BatchNorm net without kinks, and its items, for the tests of normalization."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

LAYERS = 8  # blocks of two norms, and one in the stem: 17


class NormBlock(nn.Module):
    """conv - norm - SiLU - conv - norm, plus the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))


class NormNet(nn.Module):
    """Images (N, 2, 6, 6) -> (N, 3)."""

    def __init__(self, channels: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.ModuleList([NormBlock(channels) for _ in range(LAYERS)])
        self.head = nn.Linear(channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def build_net(dtype: torch.dtype) -> NormNet:
    torch.manual_seed(3)
    return NormNet().to(dtype)


def item_batch(numbers: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Items whose mean and scale drift with their number, so that micro-batches and ranks are far from alike."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 2, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    index = torch.arange(64, dtype=torch.float64)
    x = x * (1 + 0.05 * index)[:, None, None, None] + 0.1 * index[:, None, None, None]
    return x[numbers].to(dtype), y[numbers].to(dtype)


def squared_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def large_batch(numbers: list[int], dtype: torch.dtype, steps: int = 1) -> tuple[NormNet, float]:
    """One process of plain torch on the whole logical batch: the net after its steps, and the last loss."""
    net = build_net(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    value = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        loss, count = squared_loss(net, item_batch(numbers, dtype))
        (loss / count).backward()
        optimizer.step()
        value = loss.item() / count
    return net, value
