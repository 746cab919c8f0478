"""BatchNorm with a say in whose statistics it uses: this micro-batch's, all ranks', or the whole logical batch's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.errors import WindowError
from shardkit.normalization.moments import Moments
from shardkit.normalization.normalize import Normalize
from shardkit.normalization.tape import Tape
from shardkit.world import World

_COUNTING: ContextVar[bool] = ContextVar("counting", default=True)
_INTERPOSED: ContextVar[Interposed | None] = ContextVar("interposed", default=None)

Mode = Literal["local", "sync", "deferred", "exact", "frozen"]


class BatchNorm(_BatchNorm):
    """A drop-in for BatchNorm1d, 2d and 3d with the same state dict keys; input (N, C, ...).

    Modes:
        local: statistics of this rank's micro-batch, as torch's BatchNorm; weight and bias are upcast to the
            statistics' dtype, so that a bf16 layer keeps fp32 statistics.
        sync: statistics of the micro-step over all ranks; one all-gather forward, one all-reduce backward.
        deferred: normalises like local (or like sync, with `over_ranks`); running statistics move once a logical
            batch, to what all its micro-batches and ranks hold together.
        exact: like sync, in a forward that sees all of this rank's items of the logical batch; running statistics
            move once a logical batch.
        frozen: evaluation statistics, also after `model.train()`.

    Statistics are merged from (count, mean, M2) in fp64; see `Moments`. Evaluation communicates nothing.
    """

    # Of the class, so that a layer of torch's that becomes one of ours has them all.
    mode: Mode = "local"
    over_ranks: bool = False
    world: World = World()
    group: dist.ProcessGroup | None = None
    pending: tuple[Moments, ...] = ()
    # What running statistics have yet to take in: one entry of a deferred layer, one a call of an exact one.

    def __init__(self, num_features: int, *, mode: Mode = "local", over_ranks: bool = False, **arguments: Any) -> None:
        super().__init__(num_features, **arguments)
        self.set_mode(mode, over_ranks=over_ranks)

    def set_mode(self, mode: Mode, *, over_ranks: bool = False) -> None:
        """From now on, use the statistics `mode` says."""
        self.mode = mode
        self.over_ranks = mode in ("sync", "exact") or (mode == "deferred" and over_ranks)
        self.pending = ()
        if mode == "frozen":
            self.training = False

    def train(self, mode: bool = True) -> BatchNorm:
        return super().train(mode and self.mode != "frozen")

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected input (N, {self.num_features}, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        # Without running statistics, evaluation normalises by its own batch, and by this rank's alone.
        if not self.training or self.mode == "local":
            return self._torch(input)
        interposed = _INTERPOSED.get()
        if interposed is not None and self.mode == "exact":
            return interposed.normalize(self, input)
        moments, counts = self._moments(input)
        return cast(
            torch.Tensor,
            Normalize.apply(input, self.weight, self.bias, moments, self.eps, self.reduce, counts),
        )

    def _torch(self, input: torch.Tensor) -> torch.Tensor:
        """torch's own kernel."""
        batch_statistics = self.training or self.running_mean is None
        factor = self._count_batch() if self.training else 0.0
        keep = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if keep else None,
            self.running_var if keep else None,
            _as(self.weight, self.running_mean),
            _as(self.bias, self.running_mean),
            batch_statistics,
            factor,
            self.eps,
        )

    @torch.no_grad()
    def _moments(self, input: torch.Tensor) -> tuple[Moments, bool]:
        """The statistics to normalise by, and whether `input` is part of them.

        Those of the tape in a recomputation, which must not communicate or count.
        """
        tape = Tape.current()
        played = tape.replay(self) if tape is not None else None
        if played is not None:
            return played
        moments, counts = self.share(Moments.of(input), values=input.numel() // self.num_features)
        if tape is not None:
            tape.record(self, moments, counts)
        return moments, counts

    def share(self, own: Moments, *, values: int) -> tuple[Moments, bool]:
        """The statistics that this rank's are a part of, noted for the running ones; and whether they are a part.

        `values` is `own.count` as the host knows it. One all-gather where the mode is over ranks.
        """
        counts = _COUNTING.get()
        counted = own if counts else Moments.none(self.num_features, own.mean.device)
        held = Moments.merge(self._gather(counted.packed())) if self.over_ranks else counted
        self._refuse_single_values(held, values)
        # A block that another's checkpointing recomputes, in a backward, has been counted in its first pass.
        if torch._C._current_graph_task_id() == -1:
            self._keep(held)
        # Where nothing counts, a filler is normalised by itself: by zeros it would overflow within a few layers.
        return held if counts else held.or_else(own), counts

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """`sums` over the ranks that share the statistics."""
        if not self.over_ranks or self.world.size == 1:
            return sums
        total = sums.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def _keep(self, moments: Moments) -> None:
        if self.mode == "sync":
            self._update(moments)
        elif self.mode == "exact" or not self.pending:
            self.pending = (*self.pending, moments)
        else:
            self.pending = (Moments.merge(torch.stack([self.pending[0].packed(), moments.packed()])),)

    def _refuse_single_values(self, moments: Moments, values: int) -> None:
        # Known without reading the device in all cases but that of ranks that hold one value together.
        if values <= 1 and float(moments.count) == 1:
            who = "all ranks together" if self.over_ranks else f"rank {self.world.rank}"
            raise WindowError(
                f"BatchNorm over {self.num_features} channels got one value a channel on {who}; its variance is not "
                "defined: use a larger micro-batch, or normalization.policy=group"
            )

    def _gather(self, packed: torch.Tensor) -> torch.Tensor:
        if self.world.size == 1:
            return packed[None]
        parts = [torch.empty_like(packed) for _ in range(self.world.size)]
        dist.all_gather(parts, packed, group=self.group)
        return torch.stack(parts)

    def _count_batch(self) -> float:
        """Count this batch, as torch does; the weight of its statistics."""
        if not self.track_running_stats or not _COUNTING.get():
            return 0.0
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _update(self, moments: Moments) -> None:
        """Move the running statistics; an empty batch moves and counts nothing. Does not wait for the device."""
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None or not self.track_running_stats:
            return
        seen = (moments.count > 0).double()
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(seen.long())
        if self.momentum is not None:
            factor = seen * self.momentum
        elif self.num_batches_tracked is not None:
            factor = seen / self.num_batches_tracked.clamp(min=1)
        else:
            factor = seen * 0.0
        mean.lerp_(moments.mean.to(mean.dtype), factor.to(mean.dtype))
        variance.lerp_(moments.unbiased_variance().to(variance.dtype), factor.to(variance.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def __getstate__(self) -> dict[str, Any]:
        # A process group can be neither copied nor pickled: a copy shares it, a file has none.
        state = super().__getstate__()
        return {**state, "group": _Group(state["group"])} if state.get("group") is not None else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = state.get("group")
        super().__setstate__({**state, "group": group.group} if isinstance(group, _Group) else state)


class _Group:
    """A process group on its way through copy or pickle."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> tuple[type[_Group], tuple[()]]:
        return _Group, ()


class Interposed(Protocol):
    """Takes over what exact layers do in a context."""

    def normalize(self, layer: BatchNorm, x: torch.Tensor) -> torch.Tensor: ...


@contextmanager
def interpose(instead: Interposed) -> Iterator[None]:
    """Within, exact layers are normalised by `instead`."""
    token = _INTERPOSED.set(instead)
    try:
        yield
    finally:
        _INTERPOSED.reset(token)


@contextmanager
def counting(counts: bool) -> Iterator[None]:
    """Around a forward: whether its items count in the statistics, which a filler's do not."""
    token = _COUNTING.set(counts)
    try:
        yield
    finally:
        _COUNTING.reset(token)


@torch.no_grad()
def commit(layers: Iterable[BatchNorm], world: World, *, keep: bool) -> None:
    """End a logical batch: move the running statistics of deferred and exact layers by all it held.

    One all-gather for all layers whose pending statistics are this rank's alone; a layer that a rank did not call
    takes part with none. With `keep` false the step was left out, and so is the batch.
    """
    layers = list(layers)
    if keep:
        _pool(layers, world)
        for layer in layers:
            for moments in layer.pending:
                layer._update(moments)
    for layer in layers:
        layer.pending = ()


def _pool(layers: list[BatchNorm], world: World) -> None:
    own = [layer for layer in layers if layer.mode == "deferred" and not layer.over_ranks]
    if not own or world.size == 1:
        return
    packed = []
    for layer in own:
        none = () if layer.pending else (Moments.none(layer.num_features, world.device),)
        packed += [moments.packed() for moments in (*layer.pending, *none)]
    parts = world.stack(torch.cat(packed)).split([len(p) for p in packed], dim=1)
    for layer, rows in zip(own, parts, strict=True):
        layer.pending = (Moments.merge(rows),)


def _as(parameter: nn.Parameter | None, buffer: torch.Tensor | None) -> torch.Tensor | None:
    return parameter if parameter is None or buffer is None else parameter.to(buffer.dtype)
