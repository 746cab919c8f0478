"""Parameters that a window gave no gradient: named in an error where the backend would get them wrong in silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
