"""Running statistics that agree over the ranks: each rank's are merged before they are used or kept."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.world import World


@torch.no_grad()
def merge_running_statistics(model: nn.Module, world: World) -> None:
    """Replace the running statistics of every BatchNorm by those of all ranks together, in place on every rank.

    A layer that saw only its rank's items holds that rank's mean m_r and variance v_r. Ranks saw equally many items
    (to one), so the pooled ones are m = mean(m_r) and v = mean(v_r) + mean((m_r - m)^2), Chan et al. 1979, eq. 2.1.
    One all-gather for all layers; nothing when there is one rank.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if world.size == 1 or not layers:
        return
    sizes = [layer.num_features for layer in layers]
    packed = torch.cat(
        [layer.running_mean.double() for layer in layers] + [layer.running_var.double() for layer in layers]
    )
    means, variances = world.stack(packed).chunk(2, dim=1)
    mean = means.mean(0)
    variance = variances.mean(0) + (means - mean).square().mean(0)
    for layer, m, v in zip(layers, mean.split(sizes), variance.split(sizes), strict=True):
        layer.running_mean.copy_(m)
        layer.running_var.copy_(v)
