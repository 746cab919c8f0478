"""The accumulation window: one logical batch, its one normaliser, and the step it makes.

Backends average gradients over the ranks. A mean of means is wrong when ranks or micro-batches hold different numbers
of valid items, so each loss is scaled here, once: `loss_sum * W / N`, with N the valid items of the whole window over
all ranks, counted before the first backward, and W the number of ranks the backend averages over. The gradient is
then the sum over items of dloss/dw divided by N, whatever the backend, the world size and the micro-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardkit.engines.api import Engine
from shardkit.errors import NonFiniteError, WindowError
from shardkit.losses import Loss, adapt
from shardkit.normalization.batch_norm import commit, counting
from shardkit.normalization.host import on_host
from shardkit.normalization.recomputed import named_errors
from shardkit.normalization.slices import sliced
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
    asked: bool = False
    # Whether any rank called `train_step` with ask=True.


@dataclass(frozen=True)
class Counted:
    """What all ranks know of a window before its first forward."""

    items: float
    # Valid items over all micro-batches and ranks.
    asked: bool
    # Whether any rank asked.


class Window:
    """The micro-batches of one logical batch on this rank; every rank holds the same number of them.

    A micro-batch with the attribute `filler` set to true is run, so that all ranks make the same collectives, but
    counts zero.
    """

    def __init__(self, micro_batches: Iterable[Any]) -> None:
        given = list(micro_batches)
        self._batches = [getattr(item, "batch", item) for item in given]
        self._fillers = [bool(getattr(item, "filler", False)) for item in given]
        self.sizes: tuple[int, ...] = ()
        # Of a joined window: the first dims of the micro-batches it was made of.

    def __len__(self) -> int:
        return len(self._batches)

    def weighted(self) -> Iterator[tuple[Any, bool]]:
        """(batch, whether it counts)."""
        for batch, filler in zip(self._batches, self._fillers, strict=True):
            yield batch, not filler

    def joined(self, loss: Loss) -> Window:
        """One micro-batch of all that counts, concatenated along the first dim; a filler alone stays one.

        Raises:
            WindowError: the batches cannot be concatenated, or their concatenation counts otherwise than they do.
        """
        batches = [batch for batch, counts in self.weighted() if counts]
        window = Window([join_batches(batches) if batches else self._batches[0]])
        window._fillers = [not batches]
        window.sizes = tuple(map(num_items, batches or self._batches[:1]))
        if len(batches) > 1 and float(loss.count(window._batches[0])) != sum(float(loss.count(b)) for b in batches):
            raise WindowError(
                "normalization.policy=exact runs a window as one batch, and the concatenated batch does not count as "
                "many items as its micro-batches: its tensors must have the items along their first dim"
            )
        return window

    def count_items(self, loss: Loss, world: World, *, ask: bool = False) -> Counted:
        """Count the valid items of all ranks, and hear what any of them asks; one small all-reduce.

        Raises:
            WindowError: the ranks hold different numbers of micro-batches, which would hang them later.
        """
        counts = [loss.count(batch) for batch, counts in self.weighted() if counts]
        own = sum(counts[1:], counts[0]) if counts else 0.0
        size = float(len(self))
        sums = torch.zeros(4, dtype=torch.float64, device=world.device)
        sums[0], sums[1], sums[2], sums[3] = own, size, size * size, float(ask)
        items, sizes, squares, asking = world.sum(sums).tolist()
        # Equal everywhere if and only if W * sum(k^2) = (sum k)^2: no second collective is needed to know it.
        if world.size * squares != sizes * sizes:
            raise WindowError(
                f"rank {world.rank} has {len(self)} micro-batches in this window, and the ranks do not have the same "
                f"number (mean {sizes / world.size:g}); every rank must run as many forwards as the others: give "
                "ranks that have fewer items a micro-batch that counts zero"
            )
        return Counted(items, asking > 0)


def join_batches(batches: list[Any]) -> Any:
    """Batches of one structure as one: tensors along their first dim, inside tuples, lists and mappings.

    Raises:
        WindowError: they differ in structure or in shape beyond the first dim.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if any(type(batch) is not type(first) for batch in batches):
        raise WindowError("normalization.policy=exact runs a window as one batch, and its micro-batches differ in type")
    if isinstance(first, torch.Tensor):
        if len({batch.shape[1:] for batch in batches}) > 1:
            shapes = ", ".join(sorted({str(tuple(batch.shape[1:])) for batch in batches}))
            raise WindowError(
                "normalization.policy=exact runs a window as one batch, and its micro-batches have items of different "
                f"shapes ({shapes}); pad or crop them to one shape, or use policy deferred"
            )
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {key: join_batches([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_batches(list(parts)) for parts in zip(*batches, strict=True)))
    if isinstance(first, tuple | list) and len({len(batch) for batch in batches}) == 1 and _is_structure(first):
        return type(first)(join_batches(list(parts)) for parts in zip(*batches, strict=True))
    if isinstance(first, list):
        return [item for batch in batches for item in batch]
    if all(batch == first for batch in batches):
        return first
    raise WindowError(
        f"normalization.policy=exact runs a window as one batch, and cannot concatenate {type(first).__name__}; give "
        "batches as tensors in tuples, lists or mappings"
    )


def num_items(batch: Any) -> int:
    """The first dim of the first tensor in a batch; 0 without one."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((n for n in map(num_items, parts) if n), 0)


def _is_structure(value: tuple[Any, ...] | list[Any]) -> bool:
    """Whether a sequence is the parts of a batch, as torch's collate makes them, and not one entry an item."""
    return all(isinstance(part, torch.Tensor | Mapping | tuple | list) for part in value)


def train_step(
    engine: Engine,
    window: Window | Iterable[Any],
    loss: Loss | Callable[..., Any],
    *,
    nonfinite: str = "error",
    step: int | None = None,
    with_loss: bool = True,
    ask: bool = False,
) -> WindowReport:
    """Forward and backward of every micro-batch, then one optimizer step.

    Args:
        engine: from `open_engine`.
        window: the micro-batches of one logical batch on this rank.
        loss: `loss(model, batch) -> (sum, count)`, or a mean-reducing `torch.nn` loss; see `shardkit.losses.adapt`.
        nonfinite: "error" raises, "skip" leaves the step out, when the gradient is NaN or infinite.
        step: named in errors.
        with_loss: also sum the loss over the ranks for the report (one small all-reduce).
        ask: what any rank may raise for all to know: the report's `asked`; it costs no collective.

    Raises:
        WindowError: the window is empty, or the ranks' windows differ in length.
        NonFiniteError: the gradient is NaN or infinite, with nonfinite="error".
        EngineError: the backend would train something wrongly (see its traits), or a block that is recomputed in the
            backward computes something else there.
    """
    window = window if isinstance(window, Window) else Window(window)
    if not len(window):
        raise WindowError("this window has no micro-batch; expected one or more")
    loss = adapt(loss)
    world = engine.world
    counted = window.count_items(loss, world, ask=ask)
    items = counted.items
    if items == 0:
        return WindowReport(loss=None, grad_norm=0.0, items=0.0, skipped=True, asked=counted.asked)
    if engine.norms.joined:
        window = window.joined(loss)
    sums = []
    for index, (batch, counts) in enumerate(window.weighted()):
        with engine.micro_step(last=index == len(window) - 1), counting(counts):
            with on_host(engine.norms.on_host), sliced(window.sizes):
                loss_sum, _ = loss(engine.model, batch)
            with named_errors():
                engine.backward(loss_sum * (world.size / items if counts else 0.0))
        sums.append(loss_sum.detach().double() if counts else torch.zeros_like(loss_sum, dtype=torch.float64))
    engine.norms.items_seen += sum(num_items(batch) for batch, counts in window.weighted() if counts)
    report = engine.step()
    commit(engine.norms.layers, world, keep=not report.skipped)
    if report.skipped and nonfinite == "error":
        raise NonFiniteError(_diagnosis(sums, world, report.grad_norm, step))
    total = world.sum(torch.stack(sums).sum()).item() / items if with_loss else None
    return WindowReport(
        loss=total, grad_norm=report.grad_norm, items=items, skipped=report.skipped, asked=counted.asked
    )


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
