"""The losses of torch.nn as sums with a count, so that sum / count over one batch is torch's own mean."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shardkit.errors import RequestError
from shardkit.losses.forward import check_same_shape, forward, pair, wide
from shardkit.losses.interface import Count

_BY_CLASS: tuple[type[nn.Module], ...] = (nn.CrossEntropyLoss, nn.NLLLoss)
# Their mean is over targets that are not ignored, or over the weights of those.

_BY_ROW: tuple[type[nn.Module], ...] = (
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MultiMarginLoss,
)
# Their mean is over dim 0.

_BY_ELEMENT: tuple[type[nn.Module], ...] = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)
# Their mean is over all elements, whatever their weights.


class TorchLoss:
    """A loss of torch.nn over batches `(inputs, targets)`, the model's output being a tensor.

    Its "mean" becomes a sum and a count; its "sum" does too, because the window divides by the count anyway.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take over a copy of `module`; its tensors follow the batches' device.

        Raises:
            RequestError: how many items its mean is over is not known.
        """
        known = _BY_CLASS + _BY_ROW + _BY_ELEMENT
        if type(module) not in known:
            raise RequestError(
                f"loss: what the mean of {type(module).__name__} is over is not known; expected a function "
                f"(model, batch) -> (sum, count), or one of {', '.join(kind.__name__ for kind in known)}"
            )
        self._kind = type(module)
        self._batch_mean = module.reduction == "batchmean"
        if module.reduction not in ("mean", "sum", "batchmean"):
            raise RequestError(
                f"loss: {type(module).__name__} has reduction={module.reduction!r}, which gives no single "
                "number to train on; expected reduction='mean'"
            )
        self._module: Any = copy.copy(module)
        self._module.reduction = "sum"

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Count]:
        return self._sum(forward(model, batch), batch), self.count(batch)

    def count(self, batch: Any) -> Count:
        targets = pair(batch)[1]
        if self._kind in _BY_CLASS:
            return self._class_count(targets)
        if self._kind in _BY_ROW or self._batch_mean:
            return targets.shape[0] if targets.ndim else 1
        return targets.numel()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, Count]]:
        outputs, targets = forward(model, batch), pair(batch)[1]
        metrics: dict[str, tuple[torch.Tensor, Count]] = {"loss": (self._sum(outputs, batch), self.count(batch))}
        if self._kind in _BY_CLASS and not targets.is_floating_point():
            valid = targets != self._module.ignore_index
            correct = (outputs.argmax(1 if outputs.ndim > 1 else 0) == targets) & valid
            metrics["accuracy"] = (correct.sum(), valid.sum())
        return metrics

    def _sum(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        targets = pair(batch)[1]
        if self._kind in _BY_ELEMENT:
            check_same_shape(outputs, targets)
        if targets.is_floating_point():
            targets = wide(targets)
        return self._module.to(outputs.device)(outputs, targets)

    def _class_count(self, targets: torch.Tensor) -> Count:
        if targets.is_floating_point():
            # Probabilities of every class: torch's mean is over all but the class dimension, weighted or not.
            return targets.numel() // targets.shape[1 if targets.ndim > 1 else 0]
        valid = targets != self._module.ignore_index
        weight = self._module.weight
        if weight is None:
            return valid.sum()
        weights = weight.to(targets.device)[torch.where(valid, targets, 0)]
        return torch.where(valid, weights, 0).sum()
