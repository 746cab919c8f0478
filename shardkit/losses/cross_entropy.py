"""Cross entropy: of images, sequences or pixels, with targets that do not count."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.errors import DataError
from shardkit.losses.forward import class_numbers, forward
from shardkit.losses.interface import Count


class CrossEntropy:
    """Cross entropy over batches `(inputs, targets)`; an item is a target that is not `ignore_index`.

    Targets are class numbers of any shape, as in `(N,)`, `(N, T)` or `(N, H, W)`. Logits have one more
    dimension for the classes: the last one, as in `(N, T, C)`, or the second, as in `(N, C, H, W)`.
    """

    def __init__(
        self,
        output: str | int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        class_dim: int | None = None,
    ) -> None:
        """Say where the logits are and what counts.

        Args:
            output: the key, attribute or index in the model's output of the logits; None = it is them.
            ignore_index: targets that do not count.
            label_smoothing: the part of each target's weight that is spread over all classes, 0 to 1.
            class_dim: the dimension of the logits that holds the classes, -1 or 1; None = the one that fits.
        """
        self.output = output
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.class_dim = class_dim

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Count]:
        logits, targets = self._forward(model, batch)
        return self._sum(logits, targets), self.count(batch)

    def count(self, batch: Any) -> torch.Tensor:
        return (class_numbers(batch) != self.ignore_index).sum()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, Count]]:
        logits, targets = self._forward(model, batch)
        correct = (logits.argmax(-1) == targets) & (targets != self.ignore_index)
        count = self.count(batch)
        return {"loss": (self._sum(logits, targets), count), "accuracy": (correct.sum(), count)}

    def _forward(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `(..., C)` and targets `(...)`."""
        targets = class_numbers(batch)
        logits = forward(model, batch, self.output)
        return logits.movedim(find_class_dim(logits.shape, targets.shape, self.class_dim), -1), targets

    def _sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            targets.reshape(-1),
            reduction="sum",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


def find_class_dim(logits: torch.Size, targets: torch.Size, asked: int | None = None) -> int:
    """The dimension of `logits` without which they have the shape of `targets`: the last or the second.

    Raises:
        DataError: none fits, or both do.
    """
    last = len(logits) - 1
    wanted = {1, last} if asked is None else {asked % len(logits)}
    fitting = [dim for dim in wanted if dim <= last and logits[:dim] + logits[dim + 1 :] == targets]
    if len(fitting) == 1:
        return fitting[0]
    shapes = f"logits {tuple(logits)}", f"targets {tuple(targets)}"
    if fitting:
        raise DataError(
            f"{shapes[0]} fit {shapes[1]} with the classes last and with the classes second; say which: "
            "loss.class_dim=-1, usual for sequences, or loss.class_dim=1, usual for images"
        )
    where = "last or second" if asked is None else f"at class_dim={asked}"
    raise DataError(f"{shapes[0]} do not fit {shapes[1]}; expected one more dimension for the classes, {where}")
