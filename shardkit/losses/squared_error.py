"""Squared error, element by element."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.losses.forward import check_same_shape, forward, pair, wide
from shardkit.losses.interface import Count


class MeanSquaredError:
    """Squared error over batches `(inputs, targets)`; an item is one element of the targets.

    The model's output and the targets have the same shape. Counting elements, dim 0 times the elements of a
    row, is what the mean of torch.nn.MSELoss does.
    """

    def __init__(self, output: str | int | None = None) -> None:
        """Say where the prediction is.

        Args:
            output: the key, attribute or index of the model's output that holds it; None = the output is it.
        """
        self.output = output

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Count]:
        outputs, targets = forward(model, batch, self.output), pair(batch)[1]
        check_same_shape(outputs, targets)
        return F.mse_loss(outputs, wide(targets), reduction="sum"), targets.numel()

    def count(self, batch: Any) -> int:
        return pair(batch)[1].numel()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, Count]]:
        return {"loss": self(model, batch)}
