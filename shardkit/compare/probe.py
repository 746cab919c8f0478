"""The runs of `shardkit check`: a recipe on the first windows of its data, cut so that what can go wrong is seen.

Every place runs it twice, from the same weights. As "gradient" with SGD and a learning rate so large that the new
weights are the gradient, without clipping: the gradient before clipping, which no backend need show. As "steps" with
the recipe's optimizer, accumulating, clipping, with a ragged last window: losses, gradient norms, weights and buffers
after each step, read from checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from shardkit.compare.place import RECUT, Place
from shardkit.errors import RequestError
from shardkit.recipe.schema import Batch, Recipe

STEPS = 3
# Windows: two full ones and a ragged one.
RATE = 2.0**20
# The weights are then the gradient times it, to the precision of their dtype.


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A recipe as it is run to be checked."""

    recipe: Recipe
    items: int
    # Of its training data.

    @property
    def count(self) -> int:
        """Items that are used: two windows, and a third that is ragged."""
        return min(self.items, 2 * self.recipe.batch.global_batch_size + self.recipe.batch.global_batch_size // 2 + 1)

    @property
    def steps(self) -> int:
        """Optimizer steps: no more than the recipe makes."""
        train, windows = self.recipe.train, -(-self.count // self.recipe.batch.global_batch_size)
        total = train.max_steps if train.max_steps is not None else windows * (train.max_epochs or 1)
        return min(STEPS, total)

    def gradient(self, place: Place) -> list[str]:
        """Overrides of the run that shows the gradient."""
        sgd = json.dumps({"_target_": "torch.optim.SGD", "lr": RATE})
        more = [f"optimizer={sgd}", "parameter_groups=[]", "scheduler=null", "train.max_grad_norm=null"]
        return [*self._both(place), "train.stop_at_step=1", *more]

    def stepped(self, place: Place, norm: float) -> list[str]:
        """Overrides of the run that makes steps; it clips at half of `norm`, that of the first gradient, or lower."""
        limit = min(self.recipe.train.max_grad_norm or norm, norm / 2)
        clip = [f"train.max_grad_norm={limit:.6g}"] if limit > 0 else []
        return [*self._both(place), f"train.stop_at_step={self.steps}", *clip]

    def _both(self, place: Place) -> list[str]:
        first = {"_target_": "shardkit.data.first.First", "count": self.count, "dataset": self.recipe.data.train}
        return [
            f"data.train={json.dumps(first)}",
            "data.eval=null",
            "data.drop_last=false",
            "evaluation={}",
            *cut(self.recipe.batch, place),
            "checkpoint={every: 1, keep_last: null}",
            "metrics.every=1",
        ]


def cut(batch: Batch, place: Place) -> tuple[str, ...]:
    """Overrides that cut the windows of a recipe for a place.

    Raises:
        RequestError: a global batch cannot be cut into two micro-batches a process.
    """
    micro = micro_batch_size(batch.global_batch_size, batch.micro_batch_size, place.world_size)
    if place == RECUT:
        micro = _another(batch.global_batch_size, micro)
    return f"batch.micro_batch_size={micro}", f"launch.nproc_per_node={place.world_size}"


def micro_batch_size(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """The largest micro-batch, no larger than the recipe's, that makes two or more of a window on each process.

    Raises:
        RequestError: there is none.
    """
    for size in range(min(micro_batch_size, global_batch_size // (2 * world_size)), 0, -1):
        if global_batch_size % (size * world_size) == 0:
            return size
    raise RequestError(
        f"batch.global_batch_size={global_batch_size} cannot be cut into two micro-batches on each of {world_size} "
        "processes; leave that number out of --world-sizes"
    )


def _another(global_batch_size: int, micro: int) -> int:
    """The next smaller micro-batch of one process, or where that is one item or none, the next larger."""
    sizes = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0]
    index = sizes.index(micro)
    # BatchNorm may not take one item.
    return sizes[index - 1] if index > 1 else sizes[index + 1]
