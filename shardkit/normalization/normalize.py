"""Normalisation by statistics that other ranks share, and its gradient through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardkit.normalization.moments import Moments

# (2 C,) sums of this rank -> of all who share the statistics.
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Normalize(Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var functions of every x that shares them.

    Backward, Ioffe and Szegedy 2015 (section 3), with the sums over all values that share the statistics:
    dx = weight / std * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n). The gradients of weight and bias are this
    rank's own sums; the engine adds them up over the ranks as it does for every parameter. There is no second
    derivative, and asking for it is an error.

    Arguments: x (N, C, ...); weight and bias (C,) or None; the `Moments` to normalise by; eps; what makes the sums over
    x those over all values that share the moments; and whether x is part of the moments (a filler's is not).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        reduce: Reduce,
        counts: bool,
    ) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, inverse = moments.mean.to(wide), (moments.variance() + eps).rsqrt().to(wide)
        ctx.save_for_backward(x, weight, bias, mean, inverse, moments.count)
        ctx.reduce, ctx.counts = reduce, counts
        # In place: each copy would be as large as an activation of the whole window.
        y = (x.to(wide) - _channels(mean, x)).mul_(_channels(inverse, x))
        if weight is not None:
            y.mul_(_channels(weight.to(wide), x))
        if bias is not None:
            y.add_(_channels(bias.to(wide), x))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse, count = ctx.saved_tensors
        dy = gradients[0].to(mean.dtype)
        xhat = (x.to(mean.dtype) - _channels(mean, x)).mul_(_channels(inverse, x))
        sums = sums_over(dy, xhat)
        sum_dy, sum_dy_xhat = sums.chunk(2)
        d_weight = sum_dy_xhat.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        d_bias = sum_dy.to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        dx = None
        if ctx.needs_input_grad[0]:
            # Also with an empty batch: the other ranks wait for it.
            sums = ctx.reduce(sums)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            if ctx.counts:
                mean_dy, mean_dy_xhat = (sums / count.to(sums.dtype).clamp(min=1)).chunk(2)
                dy = xhat.mul_(_channels(-mean_dy_xhat, x)).add_(dy).sub_(_channels(mean_dy, x))
            dx = (dy * _channels(scale, x)).to(x.dtype)
        return dx, d_weight, d_bias, None, None, None, None


def standardized(x: torch.Tensor, moments: Moments, eps: float) -> torch.Tensor:
    """xhat, in fp32 or wider."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    inverse = (moments.variance() + eps).rsqrt().to(wide)
    return (x.to(wide) - _channels(moments.mean.to(wide), x)) * _channels(inverse, x)


def sums_over(dy: torch.Tensor, xhat: torch.Tensor) -> torch.Tensor:
    """(2 C,): of each channel the sum of dy, then that of dy * xhat, in the dtype of xhat."""
    dims = [d for d in range(xhat.dim()) if d != 1]
    dy = dy.to(xhat.dtype)
    return torch.cat([dy.sum(dims), (dy * xhat).sum(dims)])


def _channels(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) as (1, C, 1, ...)."""
    return value.reshape(1, -1, *[1] * (like.dim() - 2))
