"""What a loss is to the window."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

Count = torch.Tensor | float


class Loss(Protocol):
    """A loss over one micro-batch.

    A plain function `(model, batch) -> (sum, count)` is enough where every item counts once; a loss with
    masks also says `count(batch)`, because the normaliser of a window is known before its first backward.
    """

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Count]:
        """The summed loss (a scalar, fp32 or wider) and its weight: the number of valid items."""
        ...

    def count(self, batch: Any) -> Count:
        """The weight `__call__` will return for `batch`, without a forward."""
        ...

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, Count]]:
        """Name -> (sum, count) of one evaluation batch, `loss` among them; summed over batches and ranks."""
        ...
