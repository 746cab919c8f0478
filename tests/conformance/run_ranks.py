"""Whole runs of a recipe on the suite's ranks: the same `train` that a launched rank calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardkit.data.digits import Digits
from shardkit.losses import CrossEntropy

ROOT = Path(__file__).parents[2]


class NumberedDigits(torch.utils.data.Dataset[Any]):
    """Digits whose items know their number; with noise drawn for each, as augmentation draws."""

    def __init__(self, split: str, noise: float = 0.0) -> None:
        self.digits, self.noise = Digits(split), noise

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> Any:
        image, label = self.digits[index]
        return image + self.noise * torch.randn(image.shape), label, index


class Ledger:
    """Cross entropy that writes down the items each training forward sees."""

    def __init__(self, path: str) -> None:
        self.path, self.loss = path, CrossEntropy()

    def __call__(self, model: Any, batch: Any) -> Any:
        if model.training and torch.is_grad_enabled():
            rank = torch.distributed.get_rank()
            with Path(f"{self.path}-{rank}").open("a") as file:
                file.write("".join(f"{number}\n" for number in batch[2].tolist()))
        return self.loss(model, batch[:2])

    def count(self, batch: Any) -> Any:
        return self.loss.count(batch[:2])

    def metrics(self, model: Any, batch: Any) -> Any:
        return self.loss.metrics(model, batch[:2])


def run_recipe(recipe: str, overrides: list[str], folder: str) -> dict[str, Any]:
    """Train `recipe` in a run folder, new or not; what the metrics say, on rank 0."""
    import json

    import shardkit
    from shardkit.engines.registry import options_of
    from shardkit.recipe.load import load
    from shardkit.run_folder import RunFolder
    from shardkit.train import train
    from tests.conformance.ranks import allow_accelerate_fsdp2

    allow_accelerate_fsdp2()
    loaded = load(ROOT / recipe, overrides, options_of=options_of)
    place = RunFolder(Path(folder))
    world = shardkit.World.current()
    if world.rank == 0:
        place.path.mkdir(parents=True, exist_ok=True)
    stopped = train(loaded.recipe, world, place)
    lines = [json.loads(line) for line in place.metrics.read_text().splitlines()] if world.rank == 0 else []
    return {
        "stopped": stopped,
        "lines": lines,
        "losses": {line["step"]: line["loss"] for line in lines if line["kind"] == "train"},
        "evals": {line["step"]: line for line in lines if line["kind"] == "eval"},
    }
