"""Running statistics that agree over the ranks: each rank's are merged before they are used or kept."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.normalization.batch_norm import BatchNorm
from shardkit.world import World


@torch.no_grad()
def merge_running_statistics(model: nn.Module, world: World) -> None:
    """Replace the running statistics of every BatchNorm by those of all ranks together, in place on every rank.

    A layer that saw only its rank's items holds that rank's mean m_r and variance v_r. Ranks saw equally many items
    (to one), so the pooled ones are m = mean(m_r) and v = mean(v_r) + mean((m_r - m)^2), Chan et al. 1979, eq. 2.1.
    One all-gather for all layers; nothing when there is one rank.
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
    means, variances = world.stack(packed).chunk(2, dim=1)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square().mean(0)
    for (kept_mean, kept_variance), m, v in zip(buffers, mean.split(sizes), variance.split(sizes), strict=True):
        kept_mean.copy_(m)
        kept_variance.copy_(v)


def _own(layer: _BatchNorm) -> bool:
    """Whether the statistics are this rank's own; shardkit's other modes already agree over the ranks."""
    return not isinstance(layer, BatchNorm) or layer.mode == "local"
