"""What a torch optimizer keeps for a parameter: tensors, which are cut like the parameter, and numbers, which are not.

A number is whatever has no dimension: Python's, None, and tensors as torch's own "step". For a parameter without a
dimension that includes its moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from shardkit.engines.api import OptimizerState, Scalar
from shardkit.errors import EngineError

# Numbers that torch.optim keeps on the host, unless the group is capturable or fused; others lie with the parameter.
_ON_HOST = ("step", "mu_product")


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is stored in intervals."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def numbers(name: str, state: Mapping[str, Any]) -> dict[str, Scalar]:
    """Copies of the numbers in an optimizer's state of one parameter.

    Raises:
        EngineError: it keeps something that is neither a tensor nor a number.
    """
    found: dict[str, Scalar] = {}
    for key, value in state.items():
        if is_tensor(value):
            continue
        if isinstance(value, torch.Tensor):
            # The optimizer counts on in the tensor it keeps.
            found[key] = value.detach().clone()
        elif value is None or isinstance(value, bool | int | float):
            found[key] = value
        else:
            raise EngineError(
                f"the optimizer keeps a {type(value).__name__} as {key!r} for {name}, which is neither a tensor nor a "
                "number and cannot be stored; use an optimizer of torch.optim, as AdamW"
            )
    return found


def placed(key: str, value: Scalar, group: Mapping[str, Any], device: torch.device) -> Scalar:
    """A number as torch.optim would keep it for a parameter on `device`, in its own memory."""
    if not isinstance(value, torch.Tensor):
        return value
    with_parameter = bool(key not in _ON_HOST or group.get("capturable") or group.get("fused"))
    dtype = torch.float32 if key == "step" and group.get("fused") else value.dtype
    return value.detach().to(device=device if with_parameter else "cpu", dtype=dtype, copy=True)


def same_number(one: Scalar, other: Scalar) -> bool:
    """Equal in value, whatever holds it."""
    first, second = (value.item() if isinstance(value, torch.Tensor) else value for value in (one, other))
    return first == second


def check_names(kept: Mapping[str, OptimizerState], names: Iterable[str]) -> None:
    """Refuse state of parameters that the optimizer does not hold.

    Raises:
        EngineError: names them.
    """
    unknown = sorted(set(kept) - set(names))
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise EngineError(f"there is optimizer state for parameters that this optimizer does not train: {shown}")


def refuse_pending(pending: bool) -> None:
    """Refuse to show or change state in the middle of a window.

    Raises:
        EngineError: says so.
    """
    if pending:
        raise EngineError(
            "gradients of an unfinished window are pending, and would be lost or added to other weights; finish the "
            "window with engine.step() first"
        )
