"""BatchNorm layers of classes that others derived from torch's: ours underneath, their behaviour on top.

A class of `kind` becomes one that derives from `kind` and from our BatchNorm, in this order. What `kind` overrides
stays; where its forward calls `super().forward`, ours is what comes next. A forward that calls `F.batch_norm` itself
(as timm's BatchNormAct2d does, before its drop and activation) is run with that call led to ours.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shardkit.errors import NormalizationError
from shardkit.normalization.batch_norm import BatchNorm

_SIGNATURE = inspect.signature(F.batch_norm)
_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNorm)


def has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether `kind` or a class between it and torch's defines forward."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return owner not in (_BatchNorm, *_TORCH)


def refusal(kind: type[_BatchNorm]) -> str | None:
    """Why our BatchNorm cannot stand in for torch's below `kind`; None when it can."""
    if kind in _TORCH or issubclass(kind, BatchNorm):
        return None
    if issubclass(kind, nn.SyncBatchNorm):
        return "derives from SyncBatchNorm, whose forward would come before ours"
    if has_own_forward(kind) and not _names(kind) & {"batch_norm", "forward"}:
        return "has a forward of its own that calls neither super().forward nor F.batch_norm"
    try:
        kept(kind)
    except TypeError as error:
        return f"cannot be combined with ours ({error})"
    return None


def _names(kind: type) -> set[str]:
    """Attributes and globals that the methods of `kind` and of its bases below torch's use."""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != "torch" and base is not object]
    functions = [inspect.unwrap(value) for base in own for value in vars(base).values() if inspect.isfunction(value)]
    return {name for function in functions for name in _used(function.__code__)}


def _used(code: CodeType) -> set[str]:
    inner = (_used(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


@functools.cache
def kept(kind: type[_BatchNorm]) -> type[BatchNorm]:
    """The class of ours that `kind` becomes; torch's own become plain BatchNorm.

    Raises:
        TypeError: Python cannot derive from both.
    """
    if kind in _TORCH:
        return BatchNorm
    namespace: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    namespace["__reduce_ex__"] = lambda self, protocol: (_blank, (kind,), self.__getstate__())
    if has_own_forward(kind):
        namespace.update(forward=_forward(kind), _moments=_only_once)
    # A class that cannot be found by its name: `__reduce_ex__` makes it anew from `kind`.
    bases: tuple[type, ...] = (kind, BatchNorm)
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(namespace))


def _blank(kind: type[_BatchNorm]) -> BatchNorm:
    cls = kept(kind)
    return cls.__new__(cls)


def _forward(kind: type[_BatchNorm]) -> Callable[..., Any]:
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        if not self.training or self.mode == "local":
            return kind.forward(self, *arguments, **named)
        tracked = self.num_batches_tracked
        self.__dict__["_before"] = None if tracked is None else tracked.clone()
        self.__dict__["_calls"] = 0
        with _Led(self):
            output = kind.forward(self, *arguments, **named)
        if self._calls != 1:
            raise NormalizationError(
                f"a {kind.__name__} normalised its batch {self._calls} times in one forward; expected once, through "
                f"super().forward or F.batch_norm: keep it with the rule {{match: {kind.__name__}, policy: keep}}"
            )
        return output

    return forward


def _only_once(self: Any, input: Tensor) -> Any:
    """`_moments`, noting the call; what the subclass counted is taken back, since ours counts."""
    self.__dict__["_calls"] += 1
    if self._before is not None:
        self.num_batches_tracked.copy_(self._before)
    return BatchNorm._moments(self, input)


class _Led(TorchFunctionMode):
    """Leads `F.batch_norm` of a layer's own forward to our BatchNorm; any other function passes."""

    def __init__(self, layer: BatchNorm) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        layer = self._layer
        given = _SIGNATURE.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        call = given.arguments
        mean, weight = call["running_mean"], call["weight"]
        if (mean is not None and mean is not layer.running_mean) or (mean is None and weight is not layer.weight):
            return func(*args, **(kwargs or {}))
        same = weight is layer.weight and call["bias"] is layer.bias and call["eps"] == layer.eps
        if not (same and call["training"]):
            name = type(layer).__name__
            raise NormalizationError(
                f"the forward of {name} gives F.batch_norm another weight, bias or eps than its own, or evaluates in "
                f"training; keep it with the rule {{match: {name}, policy: keep}}"
            )
        return BatchNorm.forward(layer, call["input"])
