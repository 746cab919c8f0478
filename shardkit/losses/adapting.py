"""Functions and torch.nn losses as losses of the window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from shardkit.errors import DataError, RequestError, WindowError
from shardkit.losses.forward import describe
from shardkit.losses.interface import Count, Loss
from shardkit.losses.modules import TorchLoss

_CHECKED_AT_ONCE = 8
# Calls. Later counts on an accelerator are compared when the next window is counted, so that no call waits.


def adapt(loss: Any) -> Loss:
    """`loss` as the window needs it; a `Loss` comes back as it is.

    A function `(model, batch) -> (sum, count)` counts the rows of the batch, and an error says when that is
    not what it returns. A loss of torch.nn is summed and counted so that sum / count over one batch is its
    mean.

    Raises:
        RequestError: it is neither, or how many items its mean is over is not known.
    """
    if isinstance(loss, type) or not callable(loss):
        raise RequestError(f"loss: {loss!r} cannot be called as a loss; expected a loss object or a function")
    if _has(loss, "count"):
        return cast(Loss, loss) if _has(loss, "metrics") else FunctionLoss(loss, count=cast(Loss, loss).count)
    if isinstance(loss, nn.Module):
        return TorchLoss(loss)
    return FunctionLoss(loss)


def _has(loss: Any, method: str) -> bool:
    return callable(getattr(loss, method, None))


class FunctionLoss:
    """A function `(model, batch) -> (sum, count)` whose count is known beforehand: the rows of the batch."""

    def __init__(self, function: Callable[..., Any], *, count: Callable[[Any], Count] | None = None) -> None:
        """Let `count` count a batch, unchecked; None = its rows, checked with what `function` returns."""
        self._function = function
        self._count = count
        self._calls = 0
        self._unchecked: list[tuple[Count, int]] = []

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Count]:
        loss, count = self._call(model, batch)
        if self._count is None:
            self._calls += 1
            self._unchecked.append((count, num_rows(batch)))
            waits = isinstance(count, torch.Tensor) and count.device.type != "cpu"
            if not waits or self._calls <= _CHECKED_AT_ONCE:
                self._check()
        return loss, count

    def count(self, batch: Any) -> Count:
        self._check()
        return num_rows(batch) if self._count is None else self._count(batch)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, Count]]:
        return {"loss": self._call(model, batch)}

    def _call(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Count]:
        result = self._function(model, batch)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor):
            if result[0].numel() == 1:
                return result
            raise WindowError(f"the loss sum has shape {tuple(result[0].shape)}; expected one number: sum it")
        raise WindowError(
            f"the loss returned {describe(result)}; expected (sum, count): the losses of the batch summed, "
            "not their mean, and over how many items"
        )

    def _check(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for count, rows in unchecked:
            if float(count) != rows:
                raise WindowError(
                    f"the loss returned the count {float(count):g} for a batch of {rows} rows; the window "
                    "has to know it before the forward: give the loss a method count(batch) that returns it"
                )


def num_rows(batch: Any) -> int:
    """Dim 0 of the first tensor in `batch`, looked for inside containers and dataclasses.

    Raises:
        DataError: there is no tensor with a dim 0.
    """
    tensor = _first_tensor(batch)
    if tensor is None or not tensor.ndim:
        raise DataError(
            f"the batch is {describe(batch)}, in which rows cannot be counted; expected a tensor with a "
            "dimension for them, or a loss with a method count(batch)"
        )
    return tensor.shape[0]


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, tuple | list):
        return None
    return next((found for item in value if (found := _first_tensor(item)) is not None), None)
