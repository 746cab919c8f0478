"""Faults to plant in one arm of a comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardkit.losses import CrossEntropy
from shardkit.models.resnet import ResNet


class DividedLoss(CrossEntropy):
    """Divides the loss by the number of ranks, as if nobody else did."""

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        total, count = super().__call__(model, batch)
        return total / torch.distributed.get_world_size(), count


class Dropping(ResNet):
    """A residual network with dropout at its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.1, self.training))


class Frozen(ResNet):
    """A residual network whose first layer is not trained."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.stem[0].requires_grad_(False)


class PerMicroBatch(torch.optim.lr_scheduler.CosineAnnealingLR):
    """Steps once a micro-batch: twice an optimizer step."""

    def step(self, epoch: int | None = None) -> None:
        super().step()
        if self.last_epoch:
            super().step()
