"""A residual network for small images, with BatchNorm after every convolution."""

from __future__ import annotations

import torch
from torch import nn

from shardkit.errors import RequestError


class ResNet(nn.Module):
    """The residual network of He et al. for CIFAR: three stages of (depth - 2) / 6 blocks.

    Images `(N, in_channels, H, W)` to logits `(N, num_classes)`.
    """

    def __init__(self, depth: int = 20, in_channels: int = 3, num_classes: int = 10, width: int = 16) -> None:
        """Build it with random weights.

        Args:
            depth: layers with weights, 6n + 2: 8, 14, 20, 26, ...
            in_channels: channels of an image.
            num_classes: logits an image.
            width: channels of the first stage; the next have 2 and 4 times as many.

        Raises:
            RequestError: no network has this depth.
        """
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            near = max(blocks, 1) * 6 + 2
            raise RequestError(f"model.depth: {depth} is not 6n + 2; the nearest that are: {near} and {near + 6}")
        self.stem = nn.Sequential(*_convolution_and_norm(in_channels, width), nn.ReLU())
        self.stages = nn.ModuleList(
            [
                _stage(width, width, blocks, stride=1),
                _stage(width, 2 * width, blocks, stride=2),
                _stage(2 * width, 4 * width, blocks, stride=2),
            ]
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        for stage in self.stages:
            features = stage(features)
        return self.head(features.mean(dim=(2, 3)))


class Block(nn.Module):
    """Two convolutions and a shortcut past them; the last norm starts at zero: a new block does nothing."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_convolution_and_norm(in_channels, out_channels, stride=stride),
            nn.ReLU(),
            *_convolution_and_norm(out_channels, out_channels, gamma=0.0),
        )
        same = stride == 1 and in_channels == out_channels
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(*_convolution_and_norm(in_channels, out_channels, kernel=1, stride=stride))
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(features) + self.shortcut(features))


def _stage(in_channels: int, out_channels: int, blocks: int, *, stride: int) -> nn.Sequential:
    later = [Block(out_channels, out_channels, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(Block(in_channels, out_channels, stride), *later)


def _convolution_and_norm(
    in_channels: int, out_channels: int, *, kernel: int = 3, stride: int = 1, gamma: float = 1.0
) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    norm = nn.BatchNorm2d(out_channels)
    nn.init.constant_(norm.weight, gamma)
    return convolution, norm
