"""Norms that do not depend on the batch, in place of a BatchNorm: GroupNorm and InstanceNorm with its weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Substitution = Literal["group", "layer", "instance"]

FEWEST_CHANNELS = 8
# Of a group, where the layer has as many; Wu and He 2018 (arXiv:1803.08494) find 8 to 16 best, table 3.


class GroupNorm(nn.GroupNorm):
    """For a BatchNorm1d: groups of channels of (N, C, L); all channels of (N, C), which is LayerNorm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        groups = 1 if input.dim() == 2 else self.num_groups
        return F.group_norm(input, groups, self.weight, self.bias, self.eps)


class InstanceNorm(_InstanceNorm):
    """For a BatchNorm1d, or one of unknown rank: each channel of each item of (N, C, L, ...)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dim() < 3 or input.shape[1] != self.num_features:
            raise ValueError(
                f"instance normalisation takes (N, {self.num_features}, L, ...), got {tuple(input.shape)}: (N, C) has "
                "one value a channel, which would become zero; use normalization.policy=layer"
            )
        return self._apply_instance_norm(input)


def num_groups(channels: int, most: int) -> int:
    """The largest divisor of `channels` up to `most` that leaves a group 8 channels; 2 where there are fewer than 8."""
    fewest = min(FEWEST_CHANNELS if channels >= FEWEST_CHANNELS else 2, channels)
    return max(groups for groups in range(1, most + 1) if channels % groups == 0 and channels // groups >= fewest)


def substitute(layer: _BatchNorm, policy: Substitution, most_groups: int) -> None:
    """Turn `layer` in place into a norm that does not depend on the batch.

    It stays the same object, at all its places, with its hooks and the same weight and bias; eps and the training
    flag stay, the running statistics go.
    """
    kind, channels = type(layer), layer.num_features
    layer._buffers.clear()
    layer._non_persistent_buffers_set.clear()
    for name in ("mode", "over_ranks", "world", "group", "pending", "process_group"):
        layer.__dict__.pop(name, None)
    if policy == "instance":
        known = {nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d}
        layer.track_running_stats = False
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            layer.register_buffer(name, None)
        new: type[nn.Module] = next((known[base] for base in known if issubclass(kind, base)), InstanceNorm)
        _become(layer, new)
        return
    groups = 1 if policy == "layer" else num_groups(channels, most_groups)
    for name in ("num_features", "momentum", "track_running_stats"):
        layer.__dict__.pop(name)
    known_rank = issubclass(kind, nn.BatchNorm2d | nn.BatchNorm3d)
    _become(layer, nn.GroupNorm if known_rank else GroupNorm)
    layer.__dict__.update(num_groups=groups, num_channels=channels)


def _become(layer: nn.Module, kind: type[nn.Module]) -> None:
    layer.__class__ = kind
