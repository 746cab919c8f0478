"""Exact BatchNorm at constant memory: a block runs one micro-batch at a time, tensors between blocks are on the host.

A norm needs the statistics of all slices before any slice can go on. So a block goes over its slices again for each
of its norms: each pass gets as far as the first norm whose statistics are not known, and gathers them there. The
backward mirrors it: a norm needs two sums over all slices, from the last norm to the first, and the last pass makes the
gradients. The device holds one slice of one block at a time, whatever the number of micro-batches; a block of two norms
costs about three times its ordinary time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardkit.errors import WindowError
from shardkit.normalization.batch_norm import BatchNorm, interpose
from shardkit.normalization.host import HostBatch, OnHost
from shardkit.normalization.moments import Moments
from shardkit.normalization.normalize import Normalize, standardized, sums_over
from shardkit.normalization.recomputed import replace_forward

# Names of blocks, for errors.
_NAMES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_SIZES: ContextVar[tuple[int, ...]] = ContextVar("sizes", default=())


@contextmanager
def sliced(sizes: Sequence[int]) -> Iterator[None]:
    """Around the forward of a joined window: how many items each of its micro-batches has."""
    token = _SIZES.set(tuple(sizes))
    try:
        yield
    finally:
        _SIZES.reset(token)


def slice_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Make each block run one micro-batch at a time, forward and backward.

    Raises:
        BackendError: something else has replaced the forward of a block.
    """
    for name, block in blocks:
        replace_forward(block, _over_slices, name=name, key="normalization", blocks="normalization.exact.blocks")
        _NAMES[block] = name


def _over_slices(block: nn.Module, *arguments: Any, **named: Any) -> Any:
    sizes = _SIZES.get()
    forward = MethodType(type(block).forward, block)
    if not sizes or not (block.training and torch.is_grad_enabled()):
        return forward(*arguments, **named)
    name = _NAMES.get(block, type(block).__name__)
    if len(arguments) != 1 or named or not isinstance(arguments[0], torch.Tensor):
        raise WindowError(f"{_where(name)} takes more than one tensor; list blocks of one input and one output")
    (x,) = arguments
    if x.shape[0] != sum(sizes):
        raise WindowError(
            f"{_where(name)} got {x.shape[0]} rows for the {sum(sizes)} items of the window; list blocks whose "
            "input has the items along its first dim"
        )
    parameters = [p for p in block.parameters() if p.requires_grad]
    return _Function.apply(_Pass(name, block, forward, sizes), x, *parameters)


def _where(name: str) -> str:
    return f"normalization.exact.memory=constant: block {name!r}"


class _Reached(Exception):
    """A slice has come to a norm whose statistics are not known."""


class _Pass:
    """One call of a block: what is known of its norms so far, by the order in which they are called."""

    def __init__(
        self, name: str, block: nn.Module, forward: Callable[[torch.Tensor], Any], sizes: tuple[int, ...]
    ) -> None:
        self.name, self.block, self.run, self.sizes = name, block, forward, sizes
        self.layers: list[BatchNorm] = []
        self.moments: list[Moments] = []
        self.counts: list[bool] = []
        self.sums: dict[int, torch.Tensor] = {}
        self._next, self._watched = 0, -1
        self._found: list[tuple[BatchNorm, torch.Tensor]] = []
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        # Each slice has a stream of its own, so that dropout is the same in every pass.
        self._seed = int(torch.randint(2**62, ()).item())
        device = next((p.device for p in block.parameters()), torch.device("cpu"))
        self._device = device
        self._autocast = {
            "device_type": device.type,
            "enabled": torch.is_autocast_enabled(device.type),
            "dtype": torch.get_autocast_dtype(device.type),
            "cache_enabled": False,
        }

    def normalize(self, layer: BatchNorm, x: torch.Tensor) -> torch.Tensor:
        """Called by a norm of the block in place of its own forward.

        Raises:
            _Reached: its statistics have to be gathered over the slices first.
        """
        index = self._next
        self._next += 1
        if index == len(self.moments):
            self._found.append((layer, x.detach()))
            raise _Reached
        if self.layers[index] is not layer:
            raise WindowError(f"{_where(self.name)} calls its norms in another order on another micro-batch")
        y = Normalize.apply(
            x,
            layer.weight,
            layer.bias,
            self.moments[index],
            layer.eps,
            # Known, or not asked for: the gradient stops at the norm whose sums are being gathered.
            lambda own: self.sums.get(index, own),
            self.counts[index],
        )
        if index == self._watched:
            self._seen = (x, y)
        return y

    def slice(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """One slice through the block, as far as it gets."""
        self._next = 0
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), interpose(self), torch.autocast(**self._autocast):
            torch.manual_seed(self._seed + number)
            y = self.run(x)
        if not isinstance(y, torch.Tensor) or y.shape[0] != x.shape[0]:
            raise WindowError(f"{_where(self.name)} does not return one tensor with the items along its first dim")
        if self._next != len(self.moments):
            raise WindowError(f"{_where(self.name)} calls {self._next} norms on one micro-batch, more on another")
        return y

    def forward(self, x: torch.Tensor) -> list[OnHost]:
        """The outputs of all slices."""
        while True:
            outputs, own = [], []
            for number, part in enumerate(self._parts(x)):
                try:
                    outputs.append(OnHost(self.slice(number, part)))
                except _Reached:
                    layer, reached = self._found.pop()
                    own.append((layer, Moments.of(reached), reached.numel() // layer.num_features))
            if not own:
                return outputs
            if outputs or len({id(layer) for layer, _, _ in own}) > 1:
                raise WindowError(f"{_where(self.name)} calls its norms in another order on another micro-batch")
            layer = own[0][0]
            moments, counts = layer.share(
                Moments.merge(torch.stack([m.packed() for _, m, _ in own])), values=sum(n for *_, n in own)
            )
            self.layers.append(layer)
            self.moments.append(moments)
            self.counts.append(counts)

    def backward(
        self, x: torch.Tensor, gradient: torch.Tensor, wants_x: bool
    ) -> tuple[list[OnHost], list[torch.Tensor | None]]:
        """The gradients of the slices, and the sum over them of each parameter's."""
        for index in reversed(range(len(self.moments))):
            self._watched, total = index, None
            for number, (part, dy) in enumerate(zip(self._parts(x), self._parts(gradient), strict=True)):
                y = self.slice(number, part)
                assert self._seen is not None
                seen_x, seen_y = self._seen
                (d_seen,) = torch.autograd.grad(y, [seen_y], dy, allow_unused=True)
                xhat = standardized(seen_x.detach(), self.moments[index], self.layers[index].eps)
                own = sums_over(torch.zeros_like(seen_y) if d_seen is None else d_seen, xhat)
                total = own if total is None else total + own
                self._seen = None
            assert total is not None
            self.sums[index] = self.layers[index].reduce(total)
        self._watched = -1
        parameters = [p for p in self.block.parameters() if p.requires_grad]
        d_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        d_x = []
        for number, (part, dy) in enumerate(zip(self._parts(x), self._parts(gradient), strict=True)):
            part.requires_grad_(wants_x)
            y = self.slice(number, part)
            inputs = [part, *parameters] if wants_x else parameters
            found = list(torch.autograd.grad(y, inputs, dy, allow_unused=True))
            if wants_x:
                own_x = found.pop(0)
                d_x.append(OnHost(torch.zeros_like(part) if own_x is None else own_x))
            d_parameters = [_sum(a, b) for a, b in zip(d_parameters, found, strict=True)]
        return d_x, d_parameters

    def _parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """The slices of `x`, each brought to the device when it is its turn."""
        if isinstance(x, HostBatch) and [part.shape[0] for part in x.slices] == list(self.sizes):
            for part in x.slices:
                yield part.tensor()
            return
        whole = x.whole() if isinstance(x, HostBatch) else x
        for part in whole.split(list(self.sizes)):
            yield part.detach().clone()


class _Function(Function):
    """A block over its slices; its parameters are inputs, so that backends see their gradients arrive."""

    @staticmethod
    def forward(ctx: Any, steps: _Pass, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.steps = steps
        ctx.save_for_backward(x)
        return HostBatch(steps.forward(x.detach()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        wants_x = ctx.needs_input_grad[1]
        with torch.enable_grad():
            d_x, d_parameters = ctx.steps.backward(x.detach(), gradient, wants_x)
        if not wants_x:
            return None, None, *d_parameters
        back = HostBatch(d_x)
        return None, back if isinstance(x, HostBatch) else back.whole(), *d_parameters


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a if b is None else b if a is None else a + b
