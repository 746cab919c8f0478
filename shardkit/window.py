"""The accumulation window: one logical batch, its one normaliser, and the step it makes.

Backends average gradients over the ranks. A mean of means is wrong when ranks or micro-batches hold different numbers
of valid items, so each loss is scaled here, once: `loss_sum * W / N`, with N the valid items of the whole window over
all ranks, counted before the first backward, and W the number of ranks the backend averages over. The gradient is
then the sum over items of dloss/dw divided by N, whatever the backend, the world size and the micro-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.engines.api import Engine
from shardkit.errors import NonFiniteError, WindowError
from shardkit.losses import Loss, adapt
from shardkit.world import World


@dataclass(frozen=True, kw_only=True)
class WindowReport:
    """What one window did; the same numbers on every rank."""

    loss: float | None
    # Sum of the losses / valid items, over all micro-batches and ranks; None when it was not asked for, or no item
    # was valid.
    grad_norm: float
    # Global norm before clipping; 0.0 when no item was valid.
    items: float
    # Valid items of the window over all ranks: the normaliser.
    skipped: bool
    # No update: the gradient was not finite, or no item was valid.


class Window:
    """The micro-batches of one logical batch on this rank; every rank holds the same number of them.

    A micro-batch with the attribute `filler` set to true is run, so that all ranks make the same collectives, but
    counts zero.
    """

    def __init__(self, micro_batches: Iterable[Any]) -> None:
        given = list(micro_batches)
        self._batches = [getattr(item, "batch", item) for item in given]
        self._fillers = [bool(getattr(item, "filler", False)) for item in given]

    def __len__(self) -> int:
        return len(self._batches)

    def weighted(self) -> Iterator[tuple[Any, bool]]:
        """(batch, whether it counts)."""
        for batch, filler in zip(self._batches, self._fillers, strict=True):
            yield batch, not filler

    def count_items(self, loss: Loss, world: World) -> float:
        """Valid items over all micro-batches and ranks; one small all-reduce, before any forward.

        Raises:
            WindowError: the ranks hold different numbers of micro-batches, which would hang them later.
        """
        counts = [loss.count(batch) for batch, counts in self.weighted() if counts]
        own = sum(counts[1:], counts[0]) if counts else 0.0
        size = float(len(self))
        # Backends other than gloo's cannot reduce a tensor of another device, so the sum stays where the counts are.
        device = own.device if isinstance(own, torch.Tensor) else torch.device("cpu")
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        sums[0], sums[1], sums[2] = own, size, size * size
        items, sizes, squares = world.sum(sums).tolist()
        # Equal everywhere if and only if W * sum(k^2) = (sum k)^2: no second collective is needed to know it.
        if world.size * squares != sizes * sizes:
            raise WindowError(
                f"rank {world.rank} has {len(self)} micro-batches in this window, and the ranks do not have the same "
                f"number (mean {sizes / world.size:g}); every rank must run as many forwards as the others: give "
                "ranks that have fewer items a micro-batch that counts zero"
            )
        return items


def train_step(
    engine: Engine,
    window: Window | Iterable[Any],
    loss: Loss | Callable[..., Any],
    *,
    nonfinite: str = "error",
    step: int | None = None,
    with_loss: bool = True,
) -> WindowReport:
    """Forward and backward of every micro-batch, then one optimizer step.

    Args:
        engine: from `open_engine`.
        window: the micro-batches of one logical batch on this rank.
        loss: `loss(model, batch) -> (sum, count)`, or a mean-reducing `torch.nn` loss; see `shardkit.losses.adapt`.
        nonfinite: "error" raises, "skip" leaves the step out, when the gradient is NaN or infinite.
        step: named in errors.
        with_loss: also sum the loss over the ranks for the report (one small all-reduce).

    Raises:
        WindowError: the window is empty, or the ranks' windows differ in length.
        NonFiniteError: the gradient is NaN or infinite, with nonfinite="error".
        EngineError: the backend would train something wrongly (see its traits).
    """
    window = window if isinstance(window, Window) else Window(window)
    if not len(window):
        raise WindowError("this window has no micro-batch; expected one or more")
    loss = adapt(loss)
    world = engine.world
    items = window.count_items(loss, world)
    if items == 0:
        return WindowReport(loss=None, grad_norm=0.0, items=0.0, skipped=True)
    sums = []
    for index, (batch, counts) in enumerate(window.weighted()):
        with engine.micro_step(last=index == len(window) - 1):
            loss_sum, _ = loss(engine.model, batch)
            engine.backward(loss_sum * (world.size / items if counts else 0.0))
        sums.append(loss_sum.detach().double() if counts else torch.zeros_like(loss_sum, dtype=torch.float64))
    report = engine.step()
    if report.skipped and nonfinite == "error":
        raise NonFiniteError(_diagnosis(sums, world, report.grad_norm, step))
    total = world.sum(torch.stack(sums).sum()).item() / items if with_loss else None
    return WindowReport(loss=total, grad_norm=report.grad_norm, items=items, skipped=report.skipped)


def _diagnosis(sums: list[torch.Tensor], world: World, grad_norm: float, step: int | None) -> str:
    """Which rank's loss it was; a collective, and every rank gets here because the norm is the same on all."""
    local = [(index, value) for index, value in enumerate(torch.stack(sums).tolist()) if not math.isfinite(value)]
    found = [
        f"the loss is {value} on rank {rank}, micro-batch {index + 1} of {len(sums)}"
        for rank, values in enumerate(world.gather(local))
        for index, value in values
    ]
    where = "" if step is None else f"step {step}: "
    cause = "; ".join(found[:4]) or f"the gradient norm is {grad_norm} while every rank's loss is finite"
    return (
        f"{where}{cause}. No update was made. Look at that batch, lower the learning rate, or let such steps be left "
        "out with train.nonfinite=skip"
    )
