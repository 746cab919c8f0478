"""One forward and backward of a recipe's model on its own data, without memory for either.

The model is on the meta device and becomes fake tensors (`torch._subclasses.FakeTensorMode`): operators run their shape
rules alone, so a model of any size is traced in seconds. What is counted are the lifetimes of the storages that
operators make (`shardkit.memory.Lifetimes`), as when a run is measured on a CPU.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardkit.data.loader import mapped
from shardkit.engines.footprint import Event, Trace, What
from shardkit.engines.names import full_name
from shardkit.engines.whole import autocast
from shardkit.losses import Loss
from shardkit.memory import Lifetimes
from shardkit.normalization.slices import sliced

# The CPU's attention, which torch's table of formulas leaves out (2.13).
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def trace(
    model: nn.Module, batch: Any, loss: Loss, *, precision: str, stored: torch.dtype, sizes: tuple[int, ...] = ()
) -> Trace:
    """Trace one micro-step.

    Args:
        model: on the meta device (or any other: only shapes are looked at), after the normalization policy; it is as
            before afterwards.
        batch: real, on the CPU; only shapes are looked at.
        loss: as the window calls it.
        precision: the recipe's; it is autocast where the engines autocast.
        stored: dtype of floating parameters in the forward.
        sizes: of a joined window: the items of each of its micro-batches.

    Raises:
        Exception: whatever the model, the loss or an operator without a shape rule raises.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as entered:
        fake = entered.enter_context(_faked(model, mode, stored))
        entered.enter_context(mode)
        # It logs a traceback of its own for what is raised here.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        entered.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        given = mapped(batch, _faker(mode))
        alive = _Counted("cpu")
        recorder = _Recorder(alive)
        entered.callback(recorder.remove)
        recorder.watch(fake)
        entered.enter_context(alive)
        entered.enter_context(sliced(sizes))
        inputs = _size(given)
        # What is there before is accounted for elsewhere.
        for tensor in (*fake.parameters(), *fake.buffers(), *_tensors(given)):
            alive.see([tensor])
            alive.leave_out(tensor)
        alive.peak = alive.current
        with autocast(precision, torch.device("cpu")):  # pyright: ignore[reportArgumentType]
            value, _ = loss(fake, given)
            (value * 1.0).backward()
            del value
        recorder.note("backward_end", "")
        return Trace(events=tuple(recorder.events), inputs=inputs, flops=alive.flops)


@contextmanager
def _faked(model: nn.Module, mode: FakeTensorMode, stored: torch.dtype) -> Iterator[nn.Module]:
    """The model with fake tensors in training mode, and as it was afterwards."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    twins: dict[int, Any] = {}

    def twin(tensor: torch.Tensor, parameter: bool) -> Any:
        if id(tensor) not in twins:
            dtype = stored if parameter and tensor.dtype.is_floating_point else tensor.dtype
            with mode:
                made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype, device="cpu")
            twins[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if parameter else made
        return twins[id(tensor)]

    training = {module: module.training for module in model.modules()}
    for module in training:
        for own, parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in own.items():
                if tensor is not None:
                    before.append((own, name, tensor))
                    own[name] = twin(tensor, parameter)
    model.train()
    try:
        yield model
    finally:
        for own, name, tensor in before:
            own[name] = tensor
        for module, was in training.items():
            module.training = was


class _Counted(Lifetimes):
    """Also counts floating-point operations, by torch's formulas (`torch.utils.flop_counter`)."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.flops = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **(kwargs or {}), out_val=result))
        elif packet is _ATTENTION:
            self.flops += int(sdpa_flop_count(*(each.shape for each in args[:3])))
        elif packet is _ATTENTION_BACKWARD:
            self.flops += int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
        return result


class _Recorder:
    """Notes what happens, and how many bytes were alive up to then."""

    def __init__(self, alive: Lifetimes) -> None:
        self.events: list[Event] = []
        self._alive = alive
        self._handles: list[Any] = []
        self._crossings: dict[int, _Crossing] = {}

    def watch(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = self._gradient(full_name(name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        for name, module in model.named_modules():
            before, after = self._forward(full_name(name))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after))

    def note(self, what: What, name: str) -> None:
        self.events.append(Event(what, name, self._alive.peak, self._alive.current))
        self._alive.peak = self._alive.current

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            high = self._alive.peak
            if parameter.grad is not None:
                self._alive.leave_out(parameter.grad)
                # A gradient is its own memory here, also where it aliases nothing that lives on.
            self.events.append(Event("gradient", name, high, self._alive.current))
            self._alive.peak = self._alive.current
            parameter.grad = None

        return arrived

    def _forward(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_module: nn.Module, arguments: Any, named: Any) -> None:
            self.note("forward", name)
            needed = [tensor for tensor in _tensors((arguments, named)) if tensor.requires_grad]
            missing = [len(needed)]

            def complete() -> None:
                missing[0] -= 1
                if not missing[0]:
                    self.note("backward_end", name)

            for tensor in needed:
                self._crossing(tensor).inputs.append(complete)

        def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
            self.note("forward_end", name)
            noted: list[bool] = []

            def first() -> None:
                if not noted:
                    noted.append(True)
                    self.note("backward", name)

            for tensor in _tensors(output):
                if tensor.requires_grad:
                    self._crossing(tensor).outputs.append(first)

        return before, after

    def _crossing(self, tensor: torch.Tensor) -> _Crossing:
        key = id(tensor)
        if key not in self._crossings:
            self._crossings[key] = crossing = _Crossing()
            tensor.register_hook(crossing)
            # Its id is another's afterwards.
            weakref.finalize(tensor, self._crossings.pop, key, None)
        return self._crossings[key]


class _Crossing:
    """A tensor between modules. When its gradient is there, the backward leaves those it goes into, and enters others.

    Modules that have it in common are nested: the innermost is left first, and the outermost entered first.
    """

    def __init__(self) -> None:
        self.inputs: list[Callable[[], None]] = []
        self.outputs: list[Callable[[], None]] = []

    def __call__(self, _gradient: torch.Tensor) -> None:
        for noted in (*reversed(self.inputs), *reversed(self.outputs)):
            noted()


def _faker(mode: FakeTensorMode) -> Callable[[Any], Any]:
    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        if isinstance(value, Mapping):
            return {key: mapped(item, fake) for key, item in value.items()}
        return value

    return fake


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    for leaf in tree_leaves(value):
        mapped(leaf, take)
    return found


def _size(value: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(value)}
    return sum(storage.nbytes() for storage in storages.values())
