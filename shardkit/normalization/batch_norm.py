"""BatchNorm with a say in whose statistics it uses: this micro-batch's, all ranks', or the whole logical batch's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.errors import WindowError
from shardkit.normalization.moments import Moments
from shardkit.normalization.tape import Tape
from shardkit.world import World

_COUNTING: ContextVar[bool] = ContextVar("counting", default=True)

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

    def __init__(self, num_features: int, *, mode: Mode = "local", over_ranks: bool = False, **arguments: Any) -> None:
        super().__init__(num_features, **arguments)
        self.mode: Mode = mode
        self.over_ranks = over_ranks or mode in ("sync", "exact")
        self.world = World()
        self.group: dist.ProcessGroup | None = None
        self.pending: Moments | None = None
        if mode == "frozen":
            self.eval()

    def train(self, mode: bool = True) -> BatchNorm:
        return super().train(mode and getattr(self, "mode", "local") != "frozen")

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected input (N, {self.num_features}, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        # Without running statistics, evaluation normalises by its own batch, and by this rank's alone.
        if not self.training or self.mode == "local":
            return self._torch(input)
        moments = self._moments(input)
        mean, variance = moments.mean, moments.variance()
        return cast(
            torch.Tensor,
            Normalize.apply(input, self.weight, self.bias, mean, variance, moments.count, self.eps, self._reducer()),
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
    def _moments(self, input: torch.Tensor) -> Moments:
        """The statistics to normalise by; the tape's in a recomputation, which must not communicate or count."""
        tape = Tape.current()
        replayed = tape.replay(self) if tape is not None else None
        if replayed is not None:
            return replayed
        own = Moments.of(input if _COUNTING.get() else input[:0])
        moments = Moments.merge(self._gather(own.packed())) if self.over_ranks else own
        self._refuse_single_values(moments, input)
        if tape is not None:
            tape.record(self, moments)
        if self.mode == "sync":
            self._update(moments)
        else:
            # Of this rank unless they are everyone's already; see `commit`.
            self.pending = moments if self.pending is None else _merged(self.pending, moments)
        return moments

    def _refuse_single_values(self, moments: Moments, input: torch.Tensor) -> None:
        # Known without reading the device in all cases but that of ranks that hold one value together.
        values = input.numel() // self.num_features
        if values <= 1 and float(moments.count) == 1 and torch.is_grad_enabled():
            raise WindowError(
                f"BatchNorm over {self.num_features} channels got one value a channel on all ranks together; its "
                "variance is not defined: use a larger micro-batch, or normalization.policy=group"
            )

    def _gather(self, packed: torch.Tensor) -> torch.Tensor:
        if self.world.size == 1:
            return packed[None]
        parts = [torch.empty_like(packed) for _ in range(self.world.size)]
        dist.all_gather(parts, packed, group=self.group)
        return torch.stack(parts)

    def _reducer(self) -> dist.ProcessGroup | bool | None:
        """The group whose ranks share the statistics; False when they are this rank's own."""
        return self.group if self.over_ranks and self.world.size > 1 else False

    def _count_batch(self) -> float:
        if not self.track_running_stats or self.num_batches_tracked is None or not _COUNTING.get():
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _update(self, moments: Moments) -> None:
        """Move the running statistics; an empty batch moves nothing."""
        if self.running_mean is None or self.running_var is None or not self.track_running_stats:
            return
        factor = self._count_batch()
        self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(moments.unbiased_variance().to(self.running_var.dtype), factor)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


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

    One all-gather for all layers whose pending statistics are this rank's alone. With `keep` false the step was left
    out, and so is the batch.
    """
    waiting = [layer for layer in layers if layer.pending is not None]
    if keep:
        own = [layer for layer in waiting if not layer.over_ranks]
        if own and world.size > 1:
            packed = [cast(Moments, layer.pending).packed() for layer in own]
            parts = world.stack(torch.cat(packed)).split([len(p) for p in packed], dim=1)
            for layer, rows in zip(own, parts, strict=True):
                layer.pending = Moments.merge(rows)
        for layer in waiting:
            layer._update(cast(Moments, layer.pending))
    for layer in waiting:
        layer.pending = None


class Normalize(Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var functions of every x that shares them.

    Backward, Ioffe and Szegedy 2015 (section 3), with the sums over all values that share the statistics:
    dx = weight / std * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n). The gradients of weight and bias are this
    rank's own sums; the engine adds them up over the ranks as it does for every parameter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        group: Any,
    ) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, inverse = mean.to(wide), (variance + eps).rsqrt().to(wide)
        ctx.save_for_backward(x, weight, bias, mean, inverse, count)
        ctx.group = group
        y = (x.to(wide) - _channels(mean, x)) * _channels(inverse, x)
        if weight is not None:
            y = y * _channels(weight.to(wide), x)
        if bias is not None:
            y = y + _channels(bias.to(wide), x)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse, count = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        dy = gradients[0].to(mean.dtype)
        xhat = (x.to(mean.dtype) - _channels(mean, x)) * _channels(inverse, x)
        sum_dy, sum_dy_xhat = dy.sum(dims), (dy * xhat).sum(dims)
        d_weight = sum_dy_xhat.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        d_bias = sum_dy.to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_dy, sum_dy_xhat])
            if ctx.group is not False:
                # Also with an empty batch: the other ranks wait for it.
                dist.all_reduce(sums, group=ctx.group)
            mean_dy, mean_dy_xhat = (sums / count.to(sums.dtype).clamp(min=1)).chunk(2)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            dx = (dy - _channels(mean_dy, x) - xhat * _channels(mean_dy_xhat, x)) * _channels(scale, x)
            dx = dx.to(x.dtype)
        return dx, d_weight, d_bias, None, None, None, None, None


def _channels(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) as (1, C, 1, ...)."""
    return value.reshape(1, -1, *[1] * (like.dim() - 2))


def _as(parameter: nn.Parameter | None, buffer: torch.Tensor | None) -> torch.Tensor | None:
    return parameter if parameter is None or buffer is None else parameter.to(buffer.dtype)


def _merged(a: Moments, b: Moments) -> Moments:
    return Moments.merge(torch.stack([a.packed(), b.packed()]))
