"""Small models with the norm layers that people have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """As torchvision's: three norms, a downsample, and one ReLU used in place."""

    def __init__(self, channels: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.bn2.weight)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """As torchvision's; the norm of the stem also stands at `again`."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        down = nn.Sequential(nn.Conv2d(channels, channels, 1, 2, bias=False), nn.BatchNorm2d(channels))
        self.layer1 = nn.Sequential(Bottleneck(channels), Bottleneck(channels, 2, down))
        self.again = self.bn1
        self.fc = nn.Linear(channels, 5)
        self.bn_head = nn.BatchNorm1d(5, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer1(torch.relu(self.bn1(self.conv1(x))))
        return self.bn_head(self.fc(self.again(x).mean((2, 3))))


class BatchNormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: it calls F.batch_norm itself, and drop and activation after it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        batch = self.training or (self.running_mean is None and self.running_var is None)
        mean = self.running_mean if not self.training or self.track_running_stats else None
        var = self.running_var if not self.training or self.track_running_stats else None
        x = F.batch_norm(x, mean, var, self.weight, self.bias, batch, factor, self.eps)
        return self.act(self.drop(x))


class SuperNormAct(nn.BatchNorm2d):
    """Calls super().forward, and an activation with a weight of its own after it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


def convs(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm(6), nn.Conv2d(6, 4, 3), norm(4))


def images(count: int = 6, size: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64) * 2 + 1


def warm(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Some steps of training forwards, so that running statistics are not those of a new layer."""
    model.train()
    with torch.no_grad():
        for scale in (1.0, 2.0):
            model(x * scale)
    return model
