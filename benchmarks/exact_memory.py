"""Peak memory of one window: the large batch in one forward, ordinary accumulation, and policy exact.

    python benchmarks/exact_memory.py
    python benchmarks/exact_memory.py --quick

The peak is of what one window makes: activations and their gradients. The model, the parameters' gradients and the
batch are there before it begins, and the same for all. Counted by `shardkit.memory.PeakBytes` on the device at hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

import shardkit
from shardkit.engines.api import NamedParameters
from shardkit.engines.opening import open_engine
from shardkit.memory import PeakBytes
from shardkit.recipe.schema import Exact, Normalization
from shardkit.window import Window, train_step
from shardkit.world import World

STAGES, BLOCKS, CHANNELS, SIDE, ITEMS = 4, 4, 16, 32, 8
# 4 stages of 4 blocks of two norms, and one norm in the stem: 33. ITEMS of SIDE x SIDE pixels in a micro-batch.
NORMS = 2 * STAGES * BLOCKS + 1
MIB = 2**20
KEEP = Normalization(policy="keep")
WAYS = {
    "exact": Exact(offload=False, blocks=["stem", "stages.*.*"]),
    "exact, nested": Exact(offload=False, blocks=["stem", "stages.*", "stages.*.*"]),
    "exact, offload": Exact(offload=True, blocks=["stem", "stages.*.*"]),
    "exact, constant": Exact(memory="constant", blocks=["stem", "stages.*.*", "head"]),
}


class Block(nn.Module):
    """conv - norm - SiLU - conv - norm, plus the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))


class Net(nn.Module):
    """Images (N, 3, H, W) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(CHANNELS), nn.SiLU())
        stages = [nn.Sequential(*(Block(CHANNELS) for _ in range(BLOCKS))) for _ in range(STAGES)]
        self.stages = nn.ModuleList(stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def peak(normalization: Normalization, micro_batches: int, items: int) -> float:
    """MiB of one window of so many micro-batches of `items`, after one that has made what stays."""
    torch.manual_seed(0)
    world = World.current()
    engine = open_engine("single", Net(), _sgd, normalization=normalization)
    window = Window(
        (torch.randn(items, 3, SIDE, SIDE, device=world.device), torch.randint(10, (items,), device=world.device))
        for _ in range(micro_batches)
    )
    train_step(engine, window, _loss)
    # The gradients stay allocated, so that the peak is of activations.
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with PeakBytes(world.device) as used:
        train_step(engine, window, _loss)
    engine.close()
    return used.peak / MIB


def measure(micro_batches: int, items: int) -> list[float]:
    """MiB of the large batch, ordinary accumulation, and exact in its ways."""
    exact = [peak(Normalization(policy="exact", exact=way), micro_batches, items) for way in WAYS.values()]
    return [peak(KEEP, 1, micro_batches * items), peak(KEEP, micro_batches, items), *exact]


def _sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.01)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 micro-batches alone, of 2 items")
    quick = parser.parse_args(argv).quick
    items = 2 if quick else ITEMS
    device = World.current().device.type
    print(f"{NORMS} norms, micro-batches of {items} images of {SIDE} x {SIDE}, {CHANNELS} channels; {device}")
    print(f"shardkit {shardkit.__version__}, torch {torch.__version__}; MiB (part of the large batch)")
    for way, exact in WAYS.items():
        print(f"{way}: blocks {' '.join(exact.blocks)}, offload {exact.offload}, memory {exact.memory}")
    print(f"\n| micro-batches | large batch | keep | {' | '.join(WAYS)} |")
    print("|---" * (len(WAYS) + 3) + "|")
    for micro_batches in (8,) if quick else (4, 8, 16):
        peaks = measure(micro_batches, items)
        cells = [f"{value:.1f} ({value / peaks[0]:.3f})" for value in peaks]
        print(f"| {micro_batches} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
