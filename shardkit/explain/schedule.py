"""How long a run is and what becomes of the learning rate, from the recipe alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardkit.checkpoint.training import Position
from shardkit.data.loader import num_items
from shardkit.data.order import GlobalOrder
from shardkit.loop import total_steps
from shardkit.optimizer import grouped
from shardkit.recipe.build import build, build_scheduler
from shardkit.recipe.schema import Recipe

MOST = 200_000
# Steps that are tried; of a longer run the last learning rate is not said.


def steps_of(recipe: Recipe) -> int | None:
    """Optimizer steps of the whole run; the data set is built where max_epochs asks for its length. None = unknown."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps
    try:
        order = GlobalOrder(
            num_items=num_items(build(recipe.data.train)),
            global_batch_size=recipe.batch.global_batch_size,
            seed=recipe.seed,
            shuffle=recipe.data.shuffle,
            drop_last=recipe.data.drop_last,
        )
    except Exception:  # a data set may lie where the ranks are
        return None
    return total_steps(recipe.train, order, Position())


def schedule(recipe: Recipe, names: Sequence[str]) -> dict[str, Any]:
    """The scheduler, its steps, and the learning rates (of the first group) that the first and the last step use.

    Args:
        recipe: the recipe.
        names: of the parameters that are trained.

    Raises:
        RequestError: a parameter group gets none of them.
    """
    steps = steps_of(recipe)
    parameters = [(name, torch.nn.Parameter(torch.zeros(1))) for name in names]
    optimizer = build(recipe.optimizer, grouped(parameters, recipe.parameter_groups))
    first = last = float(optimizer.param_groups[0].get("lr", 0.0))
    said: dict[str, Any] = {"class": "none", "steps_per_optimizer_step": 0, "steps": steps, "fails": None}
    if recipe.scheduler is not None:
        scheduler = build_scheduler(recipe.scheduler, optimizer)
        first = float(optimizer.param_groups[0]["lr"])
        said |= {"class": str(recipe.scheduler["_target_"]).rpartition(".")[2], "steps_per_optimizer_step": 1}
        try:
            last = _last(optimizer, scheduler, steps)
        except Exception as error:  # as one whose own number of steps is less
            last, said["fails"] = None, f"{type(error).__name__}: {error}"
    return {**said, "first_lr": first, "last_lr": last}


def _last(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int | None) -> float | None:
    if steps is None or steps > MOST:
        return None
    # Without a gradient it changes nothing, and the scheduler does not miss it.
    optimizer.step()
    for _ in range(steps - 1):
        scheduler.step()
    return float(optimizer.param_groups[0]["lr"])
