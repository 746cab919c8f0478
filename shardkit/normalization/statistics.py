"""Running statistics that agree over the ranks: each rank's are merged before they are used or kept."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.normalization.batch_norm import BatchNorm
from shardkit.world import World


@torch.no_grad()
def merge_running_statistics(model: nn.Module, world: World, *, items: float = 0.0) -> None:
    """Replace the running statistics of every BatchNorm by those of all ranks together, in place on every rank.

    A layer that saw only its rank's items holds that rank's mean m_r and variance v_r. With w_r the part of all items
    that rank r saw, the pooled ones are m = sum w_r m_r and v = sum w_r v_r + sum w_r (m_r - m)^2 (Chan et al. 1979,
    eq. 2.1, over all parts at once). One all-gather for all layers; nothing when there is one rank.

    Args:
        model: wrapped or not; layers whose statistics are everyone's already are left alone.
        world: the ranks.
        items: how many items this rank saw since the last merge; 0 on all ranks = the same number.
    """
    buffers = [
        (m.running_mean, m.running_var)
        for m in model.modules()
        if isinstance(m, _BatchNorm) and m.running_mean is not None and m.running_var is not None and _own(m)
    ]
    if world.size == 1 or not buffers:
        return
    sizes = [len(mean) for mean, _ in buffers]
    packed = torch.cat([mean.double() for mean, _ in buffers] + [variance.double() for _, variance in buffers])
    rows = world.stack(torch.cat([packed, packed.new_tensor([items])]))
    seen = rows[:, -1:]
    weights = torch.where(seen.sum() > 0, seen, torch.ones_like(seen))
    weights = weights / weights.sum()
    means, variances = rows[:, :-1].chunk(2, dim=1)
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean).square())).sum(0)
    for (kept_mean, kept_variance), m, v in zip(buffers, mean.split(sizes), variance.split(sizes), strict=True):
        kept_mean.copy_(m)
        kept_variance.copy_(v)


def _own(layer: _BatchNorm) -> bool:
    """Whether the statistics are this rank's own; shardkit's other modes already agree over the ranks."""
    return not isinstance(layer, BatchNorm) or layer.mode == "local"
