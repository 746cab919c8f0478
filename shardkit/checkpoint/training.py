"""Where a training run stands, besides its tensors: position, schedule, random streams, norms, best score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardkit.checkpoint.restore import listed
from shardkit.data.order import GlobalOrder
from shardkit.errors import CheckpointError

Best = dict[str, Any]
# metric, value and step of the best evaluation.


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come."""

    step: int = 0
    # Optimizer steps made.
    epoch: int = 0
    # The one that is being made, from 0.
    samples: int = 0
    # Of that epoch's order, over all ranks, that were seen.

    def after(self, order: GlobalOrder) -> Position:
        """One window later."""
        seen = min(self.samples + order.global_batch_size, order.num_items)
        if order.steps_from(seen) == 0:
            return Position(step=self.step + 1, epoch=self.epoch + 1)
        return Position(step=self.step + 1, epoch=self.epoch, samples=seen)


def training_state(
    position: Position,
    order: GlobalOrder,
    *,
    scheduler: LRScheduler | None,
    normalization: Mapping[str, object],
    seed: int,
    world_size: int,
    best: Best | None,
    recipe: Mapping[str, Any],
) -> dict[str, Any]:
    """What a checkpoint keeps of a run besides tensors, in values that need no pickle."""
    return {
        **asdict(position),
        "data": {
            "num_items": order.num_items,
            "global_batch_size": order.global_batch_size,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "drop_last": order.drop_last,
        },
        "scheduler": None if scheduler is None else {"class": _name(scheduler), "state": scheduler.state_dict()},
        "scaler": None,
        # fp16 is refused, so nothing scales gradients.
        "random": {"seed": seed, "world_size": world_size},
        "normalization": dict(normalization),
        "best": best,
        "recipe": dict(recipe),
    }


def position_in(saved: Mapping[str, Any], order: GlobalOrder) -> tuple[Position, list[str]]:
    """Where `order` goes on, and what has changed since.

    Raises:
        CheckpointError: in the middle of an epoch whose order is another now: items would be seen twice or never.
    """
    if "data" not in saved:
        # Of a loop of one's own, or converted from another library.
        return Position(step=saved["step"]), [
            "the checkpoint does not say where in the data it was made: the data begin anew"
        ]
    position = Position(step=saved["step"], epoch=saved["epoch"], samples=saved["samples"])
    was, notes = saved["data"], []
    other = [
        f"{key} is {getattr(order, key)} and was {was[key]}"
        for key in ("num_items", "seed", "shuffle")
        if getattr(order, key) != was[key]
    ]
    if other and position.samples:
        raise CheckpointError(
            f"the checkpoint is at sample {position.samples} of epoch {position.epoch}, and the order of samples is "
            f"another now ({', '.join(other)}): items would be seen twice or never. Keep the data, or start from the "
            "weights alone with init_from"
        )
    if other:
        notes.append(f"the order of samples is another from here on: {', '.join(other)}")
    if order.global_batch_size != was["global_batch_size"]:
        notes.append(
            f"the global batch size is {order.global_batch_size} and was {was['global_batch_size']}: the epoch goes on "
            f"from sample {position.samples} in windows of the new size, and a step is not what it was"
        )
    if order.steps_from(position.samples) == 0:
        position = Position(step=position.step, epoch=position.epoch + 1)
    return position, notes


def restore_scheduler(
    scheduler: LRScheduler | None,
    saved: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer,
    *,
    replay: bool,
    step: int,
    settings: tuple[Any, Any] | None = None,
) -> list[str]:
    """Put a freshly built scheduler where the saved one stood; what a user has to know.

    Args:
        scheduler: of this run.
        saved: its class and state in the checkpoint.
        optimizer: whose options were restored before.
        replay: go through the schedule of this run up to the step instead (load.groups=recipe).
        step: the checkpoint's.
        settings: `scheduler:` of the checkpoint's recipe and of this one; None = there are no recipes.

    Raises:
        CheckpointError: it is another class of scheduler.
    """
    if scheduler is None:
        return ["this recipe has no learning rate scheduler, as the checkpoint had: the rate stays"] if saved else []
    if replay:
        _replay(scheduler, int(saved["state"]["last_epoch"]) if saved else step)
        return []
    if saved is None:
        # Restoring the optimizer's options undid what building the scheduler had set.
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
        return [
            f"the checkpoint had no learning rate scheduler: the recipe's begins here (load.groups=recipe takes it as "
            f"of step {step})"
        ]
    if saved["class"] != _name(scheduler):
        raise CheckpointError(
            f"the checkpoint's scheduler is {saved['class']}, and this run's {_name(scheduler)}; keep the scheduler, "
            "or take the recipe's schedule at this step with load.groups=recipe"
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    own = scheduler.state_dict()
    scheduler.load_state_dict(dict(saved["state"]))
    # Building the scheduler set lr to that of its first step, before the optimizer's options were restored.
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    if settings is not None:
        return _changed(*settings, scheduler)
    changed = [
        f"{key} is {saved['state'][key]} in the checkpoint and goes on, the recipe's {own[key]} does not hold"
        for key in own
        if key in saved["state"] and not key.startswith("_") and key not in _MOVING
        if own[key] != saved["state"][key] and isinstance(own[key], int | float | list | tuple | str)
    ]
    return [f"scheduler: {', '.join(changed)} (load.groups=recipe takes the recipe's)"] if changed else []


def _changed(was: Any, now: Any, scheduler: LRScheduler) -> list[str]:
    """What a recipe has changed of a schedule that goes on as it was."""
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key)] if was and now else []
    if not keys:
        return []
    told = ", ".join(f"{key} was {was.get(key)} and is {now.get(key)}" for key in keys)
    if any(key.startswith("lr_lambda") for key in scheduler.state_dict()):
        return [f"scheduler: {told}; a checkpoint does not hold functions, so the recipe's hold from here on"]
    return [f"scheduler: {told}; the checkpoint's goes on (load.groups=recipe takes the recipe's)"]


# What a schedule itself changes.
_MOVING = {"last_epoch", "num_bad_epochs", "cooldown_counter", "best", "T_cur", "T_i", "base_lrs"}


def check_norms(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Compare what the normalization policy made of each layer with what it is in the checkpoint, if it says so.

    Raises:
        CheckpointError: a layer is of another kind, so that its weights mean something else.
    """
    if saved is None:
        return []
    before, here = _layers(saved), _layers(now)
    other = [
        f"{name} was {before[name]} and is {here[name]}"
        for name in before
        if name in here and _kind(before[name]) != _kind(here[name])
    ]
    if other:
        raise CheckpointError(
            f"normalization: the checkpoint was trained with policy {saved['policy']}, this run has policy "
            f"{now['policy']}, and weights of one norm mean nothing to another: {listed(other)}. Use "
            f"normalization.policy={saved['policy']}, or leave these layers out: init_from with load.exclude"
        )
    if saved["policy"] != now["policy"] or any(before[name] != here[name] for name in before.keys() & here.keys()):
        return [
            f"normalization: the policy was {saved['policy']} and is {now['policy']}; running statistics go on, "
            "training sees other ones"
        ]
    return []


def _layers(report: Mapping[str, Any]) -> dict[str, str]:
    return {name: row["new"] for row in report["rows"] for name in row["names"]}


def _kind(layer: str) -> str:
    """BatchNorm of any policy is one kind: the same parameters and running statistics."""
    return "BatchNorm" if "BatchNorm" in layer else layer


def _name(scheduler: LRScheduler) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def _replay(scheduler: LRScheduler, steps: int) -> None:
    import warnings

    with warnings.catch_warnings():
        # That no optimizer step was made before the scheduler's.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scheduler.step()
