"""Parameters that a window gave no gradient: named in an error where the backend would get them wrong in silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardkit.engines.api import NamedParameters
from shardkit.errors import EngineError


def refuse_unused(names: Sequence[str], remedy: str) -> None:
    """Raise when there are any.

    Raises:
        EngineError: names the parameters and what to do.
    """
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise EngineError(
            f"{len(names)} trainable parameters got no gradient from the window: {shown}. This backend would not "
            f"leave them as they are. Freeze them (requires_grad_(False)), use them, or set {remedy}"
        )


class GradientWatch:
    """Sees which parameters a window gives a gradient, where `.grad` itself cannot be read."""

    def __init__(self, named: NamedParameters) -> None:
        self._names = [name for name, _ in named]
        self._arrived: set[str] = set()
        for name, parameter in named:
            parameter.register_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        return lambda _gradient: self._arrived.add(name)

    def window(self) -> tuple[set[str], list[str]]:
        """(names that got one since the last call, names that did not)."""
        arrived, self._arrived = self._arrived, set()
        return arrived, [name for name in self._names if name not in arrived]

    @property
    def pending(self) -> bool:
        """Whether some arrived since the last call of `window`."""
        return bool(self._arrived)


class UnusedWatch:
    """Refuses windows that give a parameter no gradient where ZeRO would change it all the same.

    A flat partition is updated whole: such a parameter is decayed, moved on by its momentum, and under stage 3
    (DeepSpeed 0.19.8) moved by the gradient of the last window that gave it one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: NamedParameters) -> None:
        # Before deepspeed.initialize, which replaces the optimizer's parameters.
        decayed = {id(p) for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
        self._decayed = {name for name, parameter in named if id(parameter) in decayed}
        self._seen: set[str] = set()
        self._watch = GradientWatch(named)

    def check(self) -> None:
        """Call before the step.

        Raises:
            EngineError: names what would be changed without a gradient.
        """
        arrived, missing = self._watch.window()
        refuse_unused(
            [name for name in missing if name in self._seen or name in self._decayed],
            "weight_decay 0 in parameter_groups for those that never get one; a backend for those that sometimes do "
            "is fsdp2, or ddp with find_unused_parameters",
        )
        self._seen |= arrived

    @property
    def pending(self) -> bool:
        """Whether the window has given gradients that no step took."""
        return self._watch.pending

    def restart(self, seen: set[str]) -> None:
        """After a load: `seen` got a gradient in some window before."""
        self._seen = seen
