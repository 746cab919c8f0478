"""Your own loop, on any backend: fit a small network to noisy sines.

torchrun --nproc-per-node 2 docs/own_loop.py zero2
python docs/own_loop.py single
"""

import sys

import torch
from torch import nn

import shardkit


def make_optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Called by the engine with the parameters that will really be trained."""
    return torch.optim.AdamW([p for _, p in named_parameters], lr=3e-3)


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The sum over items, and how many there are: shardkit divides, once, by the items of the whole window."""
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def main(backend: str) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    with shardkit.join() as world:
        engine = shardkit.open_engine(backend, model, make_optimizer, max_grad_norm=1.0)
        generator = torch.Generator().manual_seed(world.rank)
        loss = float("nan")
        for step in range(1, 201):
            # One logical batch: four micro-batches of 16 items on this rank.
            window = []
            for _ in range(4):
                x = torch.rand(16, 1, generator=generator).to(world.device) * 6 - 3
                window.append((x, torch.sin(x)))
            report = shardkit.train_step(engine, window, squared_error, step=step)
            loss = report.loss or loss
            if world.rank == 0 and step % 50 == 0:
                print(f"step {step}: loss {loss:.4f}, grad norm {report.grad_norm:.3f}", flush=True)
        engine.close()
    return loss


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "single")
