"""One logical batch through a copy of the model, and what each BatchNorm made of it.

Ranks are seen in one process: a layer that keeps its rank's statistics sees the micro-batches of one rank after the
other and is merged as before an evaluation; one that shares them sees the micro-batches of a step as one.

An update is linear: r <- (1 - m) r + m s. So layers start here from zero, and both what the model's own running
statistics become and where they would settle follow without cancellation: with w = 1 - (1 - m)^updates, x is what has
come together from zero, x / w is where they settle (the same batch for ever), and (1 - w) r + x what they become.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.doctor.subject import Subject
from shardkit.engines.api import Engine
from shardkit.normalization import BatchNorm, Moments, commit
from shardkit.world import World

Statistics = tuple[torch.Tensor, torch.Tensor]
# (mean, variance) of the channels, fp64.


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One layer after one logical batch."""

    layer: _BatchNorm
    updates: int
    # Of the running statistics, on one rank.
    calls: tuple[Moments, ...]
    # The statistics of its input in each forward.
    become: Statistics | None
    # The running statistics; None: it keeps none.
    settled: Statistics | None
    # What they would be if this batch came again and again.

    @property
    def mode(self) -> str:
        """Whose statistics it uses."""
        if isinstance(self.layer, BatchNorm):
            return self.layer.mode
        return "sync" if isinstance(self.layer, nn.SyncBatchNorm) else "local"


def large_batch(subject: Subject, engine: Engine) -> dict[str, Observed]:
    """The layers by name, after all items in one forward."""
    return observe(subject, engine, [[subject.joined(subject.micro_batches())]])


def cycle(subject: Subject, engine: Engine) -> dict[str, Observed]:
    """The layers by name, after the micro-batches of all ranks, as the engine's policy has them."""
    if engine.norms.joined:
        return large_batch(subject, engine)
    if subject.world_size > 1 and any(_shares(layer) for layer in training_norms(engine.model).values()):
        steps = range(subject.accumulation)
        at = [[batches[step] for batches in subject.ranks if step < len(batches)] for step in steps]
        return observe(subject, engine, [[subject.joined(batches) for batches in at]])
    return observe(subject, engine, [batches for batches in subject.ranks if batches])


@torch.no_grad()
def observe(subject: Subject, engine: Engine, ranks: list[list[Any]]) -> dict[str, Observed]:
    """Run the forwards of each rank in turn. The engine's model is used up: its statistics are no longer its own."""
    layers = training_norms(engine.model)
    starts = {name: _read(layer) for name, layer in layers.items()}
    counted = {name: _count(layer) for name, layer in layers.items()}
    calls: dict[str, list[Moments]] = {name: [] for name in layers}
    found: dict[str, list[tuple[Statistics | None, int]]] = {name: [] for name in layers}
    with _without_dropout(engine.model), _listening(layers, calls):
        for batches in ranks:
            _clear(layers)
            for batch in batches:
                with engine.inference():
                    subject.loss(engine.model, batch)
            for name, layer in layers.items():
                if not _waits(layer):
                    found[name].append((_read(layer), _count(layer)))
    # A logical batch is one, however many ranks: layers that wait for its end have kept all of it.
    commit(engine.norms.layers, World(device=subject.device), keep=True)
    for name, layer in layers.items():
        if _waits(layer):
            found[name].append((_read(layer), _count(layer)))
    return {
        name: _observed(layer, starts[name], counted[name], found[name], tuple(calls[name]))
        for name, layer in layers.items()
        if calls[name]
    }


def training_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that normalise by their batch, by their first name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and not (isinstance(module, BatchNorm) and module.mode == "frozen")
        and (module.training or module.running_mean is None)
    }


def _observed(
    layer: _BatchNorm,
    start: Statistics | None,
    counted: int,
    found: list[tuple[Statistics | None, int]],
    calls: tuple[Moments, ...],
) -> Observed:
    updates = max(count for _, count in found)
    if start is None:
        return Observed(layer=layer, updates=0, calls=calls, become=None, settled=None)
    become, settled = [], []
    for gathered, count in found:
        assert gathered is not None
        weight, share = _weights(layer.momentum, count, counted)
        ends = [value / share if share else initial for value, initial in zip(gathered, start, strict=True)]
        settled.append((ends[0], ends[1]))
        mean, variance = (weight * end + (1 - weight) * begin for end, begin in zip(ends, start, strict=True))
        become.append((mean, variance))
    return Observed(layer=layer, updates=updates, calls=calls, become=_merged(become), settled=_merged(settled))


def _weights(momentum: float | None, updates: int, counted: int) -> tuple[float, float]:
    """The weight of the updates in what the statistics become, and their share in what came together from zero."""
    if momentum is None:  # the average over all batches ever
        return updates / max(counted + updates, 1), 1.0 if updates else 0.0
    weight = 1 - (1 - momentum) ** updates
    return weight, weight


def _merged(ranks: list[Statistics]) -> Statistics:
    """Over ranks, as `merge_running_statistics` does before an evaluation."""
    means, variances = torch.stack([mean for mean, _ in ranks]), torch.stack([variance for _, variance in ranks])
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)


def _waits(layer: _BatchNorm) -> bool:
    """Whether its running statistics move at the end of the logical batch only."""
    return isinstance(layer, BatchNorm) and layer.mode in ("deferred", "exact")


def _shares(layer: _BatchNorm) -> bool:
    """Whether it normalises by the items of all ranks."""
    return layer.over_ranks if isinstance(layer, BatchNorm) else isinstance(layer, nn.SyncBatchNorm)


def _read(layer: _BatchNorm) -> Statistics | None:
    if layer.running_mean is None or layer.running_var is None or not layer.track_running_stats:
        return None
    mean, variance = (
        buffer.detach().to("cpu", torch.float64, copy=True) for buffer in (layer.running_mean, layer.running_var)
    )
    return mean, variance


def _count(layer: _BatchNorm) -> int:
    return 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)


def _clear(layers: dict[str, _BatchNorm]) -> None:
    for layer in layers.values():
        for buffer in (layer.running_mean, layer.running_var, layer.num_batches_tracked):
            if buffer is not None:
                buffer.zero_()


@contextmanager
def _listening(layers: dict[str, _BatchNorm], calls: dict[str, list[Moments]]) -> Iterator[None]:
    def listen(name: str) -> Any:
        def hear(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            moments = Moments.of(cast(torch.Tensor, arguments[0] if arguments else named["input"]))
            calls[name].append(Moments(moments.count.cpu(), moments.mean.cpu(), moments.m2.cpu()))

        return hear

    handles = [layer.register_forward_pre_hook(listen(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """What dropout draws differs with the cut, and is not what is asked."""
    silent = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    for module in silent:
        module.eval()
    try:
        yield
    finally:
        for module in silent:
            module.train()
