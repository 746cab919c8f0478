"""From a batch `(inputs, targets)` to the tensors a loss is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardkit.errors import DataError


def pair(batch: Any) -> tuple[Any, torch.Tensor]:
    """The `(inputs, targets)` of a batch.

    Raises:
        DataError: it is not such a pair.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], torch.Tensor):
        return batch[0], batch[1]
    raise DataError(
        f"the batch is {describe(batch)}; this loss expects (inputs, targets) with targets a tensor: return "
        "such pairs from the data set, or write the loss as a function (model, batch) -> (sum, count)"
    )


def class_numbers(batch: Any) -> torch.Tensor:
    """The targets of a batch, as int64 class numbers.

    Raises:
        DataError: they are not integers.
    """
    targets = pair(batch)[1]
    if targets.is_floating_point() or targets.is_complex():
        raise DataError(f"targets are {targets.dtype}; expected class numbers, as in torch.int64")
    return targets.long()


def forward(model: nn.Module, batch: Any, output: str | int | None = None) -> torch.Tensor:
    """What the model makes of the inputs of `batch`, in fp32 or wider; inputs in a mapping are keywords.

    Args:
        model: called once.
        batch: `(inputs, targets)`.
        output: the key, attribute or index in the model's output of the tensor; None = it is it.

    Raises:
        DataError: there is no tensor where `output` says.
    """
    inputs, _ = pair(batch)
    outputs = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    found = outputs if output is None else _field(outputs, output)
    if isinstance(found, torch.Tensor):
        return wide(found)
    raise DataError(
        f"the model's output is {describe(outputs)}, "
        + ("not a tensor" if output is None else f"and {output!r} is no tensor in it")
        + "; say which tensor the loss is of, as in {_target_: shardkit.losses.CrossEntropy, output: logits}"
    )


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in fp32, or in fp64 as it is: in bf16, 256 + 1 is 256."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def check_same_shape(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Refuse shapes that torch would broadcast, with another number of elements than the targets have.

    Raises:
        DataError: the shapes differ.
    """
    if outputs.shape != targets.shape:
        raise DataError(
            f"the model's output has shape {tuple(outputs.shape)}, the targets {tuple(targets.shape)}; "
            "expected the same shape"
        )


def describe(value: Any) -> str:
    """The type of a batch or an output and its fields, for a message."""
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"{name} with {', '.join(map(str, value))}"
    if dataclasses.is_dataclass(value):
        return f"{name} with {', '.join(field.name for field in dataclasses.fields(value))}"
    if isinstance(value, tuple | list):
        return f"{name} of ({', '.join(type(item).__name__ for item in value)})"
    return name


def _field(outputs: Any, name: str | int) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get(name)
    if isinstance(name, str):
        return getattr(outputs, name, None)
    return outputs[name] if isinstance(outputs, tuple | list) and name < len(outputs) else None
