"""Evaluation: metrics over the whole data set, each item counted once, whatever the number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardkit.normalization.statistics import merge_running_statistics

if TYPE_CHECKING:
    from shardkit.data.loader import Windows
    from shardkit.engines.api import Engine
    from shardkit.losses import Loss


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The means over the data set, the same on every rank."""

    values: dict[str, float]
    # NaN where no item counted.
    items: float
    # Valid items the loss is a mean of.


def evaluate(engine: Engine, windows: Windows, loss: Loss) -> Scores:
    """The loss's metrics over all of `windows`; the model is left in the modes it was in.

    Running statistics that differ by rank are merged first, and stay merged. Sums and counts cross the ranks once, at
    the end, in float64: a mean of means would depend on the cutting.
    """
    merge_running_statistics(engine.model, engine.world, items=engine.norms.items_seen)
    engine.norms.items_seen = 0.0
    sums: defaultdict[str, torch.Tensor] = defaultdict(lambda: _zero(engine))
    counts: defaultdict[str, torch.Tensor] = defaultdict(lambda: _zero(engine))
    with _evaluating(engine.model), engine.inference():
        for window in windows.epoch(0):
            for micro_batch in window:
                # A filler is run too: forwards gather parameters on some backends, and no rank may miss one.
                for name, (total, count) in loss.metrics(engine.model, micro_batch.batch).items():
                    sums[name] += 0.0 if micro_batch.filler else total
                    counts[name] += 0.0 if micro_batch.filler else count
    # A metric may have been met on some ranks only, as that of a class no item of this rank has.
    names = sorted({name for own in engine.world.gather(list(sums)) for name in own})
    packed = engine.world.sum(torch.stack([*(sums[name] for name in names), *(counts[name] for name in names)]))
    numbers = packed.tolist()
    totals = dict(zip(names, numbers[: len(names)], strict=True))
    weights = dict(zip(names, numbers[len(names) :], strict=True))
    return Scores(
        values={name: totals[name] / weights[name] if weights[name] else float("nan") for name in names},
        items=weights.get("loss", 0.0),
    )


def _zero(engine: Engine) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=engine.world.device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, then each module's own mode again: a frozen layer stays frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
