"""Time of policies sync and exact as ratios: to a plain all-reduce SyncBatchNorm, and to ordinary accumulation.

    python benchmarks/norm_timing.py
    python benchmarks/norm_timing.py --quick

Two ranks on gloo. A repeat times all contestants once, in turn, so that what else the machine does meets all of them;
a ratio is of one repeat, and its median and quartiles are over the repeats.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import shardkit
from shardkit.engines.api import Engine, NamedParameters
from shardkit.engines.opening import open_engine
from shardkit.models.resnet import ResNet
from shardkit.window import Window, train_step

RANKS, MICRO_BATCHES, ITEMS, SIDE = 2, 4, 8, 32
# ITEMS of a micro-batch of one rank.
RATIOS = {
    "sync / plain all-reduce": ("sync", "plain"),
    "sync / keep": ("sync", "keep"),
    "exact / keep": ("exact", "keep"),
    "exact / sync": ("exact", "sync"),
}


class AllReduced(torch.autograd.Function):
    """A sum over the ranks whose gradient is summed over the ranks too."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class PlainSync(nn.BatchNorm2d):
    """Synchronised BatchNorm as it is usually written by hand: E[x] and E[x^2] over the ranks, autograd does the rest.

    Right for equal batches; E[x^2] - E[x]^2 loses digits where the mean is large.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None
        mean = AllReduced.apply(input.mean((0, 2, 3))) / RANKS
        squares = AllReduced.apply(input.square().mean((0, 2, 3))) / RANKS
        variance = squares - mean.square()
        with torch.no_grad():
            count = RANKS * input.numel() / input.shape[1]
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * count / (count - 1), 0.1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return input * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def contestants() -> dict[str, Engine]:
    """The same network under each way to normalise."""
    made = {}
    for name in ("plain", "keep", "sync", "exact"):
        torch.manual_seed(0)
        model = ResNet(depth=14, in_channels=3)
        if name == "plain":
            for module in model.modules():
                if type(module) is nn.BatchNorm2d:
                    module.__class__ = PlainSync
        policy = "keep" if name == "plain" else name
        made[name] = open_engine("ddp", model, _sgd, normalization=policy)  # pyright: ignore[reportArgumentType]
    return made


def repeat(engines: dict[str, Engine], times: int) -> list[dict[str, float]]:
    """Seconds of one window, by contestant, after two windows that warm up."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(ITEMS, 3, SIDE, SIDE, generator=generator), torch.randint(10, (ITEMS,), generator=generator))
        for _ in range(MICRO_BATCHES)
    ]
    found = []
    for number in range(times + 2):
        seconds = {}
        # In turn from another one each time.
        for name in sorted(engines, key=lambda name: (list(engines).index(name) + number) % len(engines)):
            dist.barrier()
            begun = time.perf_counter()
            train_step(engines[name], Window(batches), _loss, with_loss=False)
            dist.barrier()
            seconds[name] = time.perf_counter() - begun
        found.append(seconds)
    return found[2:]


def _sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.01)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.3f} | {low:.3f} to {high:.3f}"


def _rank(rank: int, folder: str, times: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = repeat(contestants(), times)
    if rank == 0:
        print("| contestant | median, ms | quartiles |\n|---|---|---|")
        for name in found[0]:
            print(f"| {name} | {spread([1000 * seconds[name] for seconds in found])} |")
        print("\n| ratio | median | quartiles |\n|---|---|---|")
        for title, (ours, other) in RATIOS.items():
            print(f"| {title} | {spread([seconds[ours] / seconds[other] for seconds in found])} |", flush=True)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 21")
    times = 5 if parser.parse_args(argv).quick else 21
    quick = " --quick" if times == 5 else ""
    print(f"python benchmarks/{Path(__file__).name}{quick}")
    print(
        f"shardkit {shardkit.__version__}, torch {torch.__version__}, Python {platform.python_version()}; {RANKS} "
        f"ranks on gloo (ddp), one thread each; ResNet-14 of 15 norms, {MICRO_BATCHES} micro-batches of {ITEMS} images "
        f"of {SIDE} x {SIDE} a rank; {times} repeats\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, times), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
