"""A block that is recomputed in the backward, so that what its forward made need not be kept until then.

By torch's non-reentrant checkpointing (Chen et al. 2016, arXiv:1604.06174), which gives the second pass the random
numbers and the autocast of the first. A norm of shardkit's plays back the statistics of the first pass, and all other
buffers are copies of what they were before it: nothing is communicated, moved or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from shardkit.errors import BackendError, EngineError
from shardkit.normalization.tape import Tape


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """The forward of one block, with its recomputation; give it to `replace_forward`."""

    name: str
    # Of the block.
    key: str
    # The recipe's, that asks for it,
    blocks: str = "blocks"
    # and the one that names blocks.
    latest: ClassVar[Recomputed | None] = None
    # The block that was recomputed last: torch does not say whose recomputation it complains of.

    def __call__(self, block: nn.Module, *arguments: Any, **named: Any) -> Any:
        # partial: an argument of the block may have the name of one of checkpoint's.
        forward = partial(type(block).forward, block, **named)
        if not torch.is_grad_enabled():
            return forward(*arguments)
        tape = Tape()
        again = _Again(self, block, tape)
        run = _cleared(forward)
        return checkpoint(run, *arguments, use_reentrant=False, context_fn=lambda: (tape.recording(), again))


def _cleared(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, after which autocast holds no cast copies of its weights: else those of all blocks until the end.

    Uses of a weight within the block share one copy, on which their gradients are added up, as without recomputation.
    """

    def run(*arguments: Any) -> Any:
        try:
            return forward(*arguments)
        finally:
            torch.clear_autocast_cache()

    return run


class _Again(AbstractContextManager[None]):
    """Around the second pass, which may be made more than once."""

    def __init__(self, recomputed: Recomputed, block: nn.Module, tape: Tape) -> None:
        self._recomputed, self._tape = recomputed, tape.replaying()
        self._before = [(module, _copies(module._buffers)) for module in block.modules() if module._buffers]
        self._live: list[dict[str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        Recomputed.latest = self._recomputed
        self._tape.__enter__()
        self._live = [dict(module._buffers) for module, _ in self._before]
        for module, buffers in self._before:
            module._buffers.update(_copies(buffers))

    def __exit__(self, *error: Any) -> None:
        for (module, _), live in zip(self._before, self._live, strict=True):
            module._buffers.update(live)
        self._tape.__exit__(*error)


def _copies(buffers: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def replace_forward(block: nn.Module, run: Callable[..., Any], *, name: str, key: str, blocks: str) -> None:
    """Have calls of `block` go to `run(block, ...)`, which finds the block's own forward in its class.

    The method and not the module is replaced, so that what a backend hooks around the module (gathering its parameters)
    also happens around a recomputation; as a method of this one block, so that a deep copy of the model runs its own.

    Args:
        block: a module.
        run: what runs in place of its forward.
        name: of the block; and
        key: of the recipe, that asks for it; and
        blocks: the one that names blocks: for the error.

    Raises:
        BackendError: something else has replaced the forward already.
    """
    already = vars(block).get("forward")
    if already is not None and getattr(already, "__func__", None) != run:
        raise BackendError(
            f"{key}: the forward of block {name!r} was replaced already; open the engine before that is done, or list "
            f"other blocks under {blocks}"
        )
    block.forward = MethodType(run, block)


def is_recomputed(module: nn.Module) -> bool:
    """Whether it is a block with a forward that is recomputed in the backward."""
    return isinstance(getattr(vars(module).get("forward"), "__func__", None), Recomputed)


@contextmanager
def named_errors() -> Iterator[None]:
    """Around a backward: a recomputation that is not its first pass is an error that names the block and its key.

    Raises:
        EngineError: a block computed something else in its second pass.
    """
    try:
        yield
    except CheckpointError as error:
        block = Recomputed.latest
        if block is None:  # the model's own checkpointing
            raise
        said = str(error).removeprefix("torch.utils.checkpoint: ").splitlines()[0].rstrip(".")
        raise EngineError(
            f"{block.key}: block {block.name!r} did not compute the same in the backward as in its forward: {said}. A "
            "block that is recomputed must take the same way both times: draw from torch's random streams only, and "
            f"keep nothing between calls but buffers; or list other blocks under {block.blocks}, or do without "
            f"{block.key}"
        ) from error
    finally:
        Recomputed.latest = None
