"""Parameters that a window gave no gradient: named in an error where the backend would get them wrong in silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

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
    """Sees which parameters the first window gives a gradient, where `.grad` itself cannot be read."""

    def __init__(self, named: NamedParameters) -> None:
        self._waiting = dict(named)
        self._hooks: list[RemovableHandle] = [parameter.register_hook(self._arrived(name)) for name, parameter in named]

    def _arrived(self, name: str) -> Any:
        def hook(_gradient: Any) -> None:
            self._waiting.pop(name, None)

        return hook

    def finish(self) -> list[str]:
        """The names that got none; stops watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return list(self._waiting)
