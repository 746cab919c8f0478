"""Exact large-batch BatchNorm under accumulation: one forward of the whole window, in blocks that are recomputed.

A window's micro-batches are concatenated, so each BatchNorm sees all of this rank's items at once. Memory is brought
back down by recomputing each block that holds norms in the backward (non-reentrant checkpointing, Chen et al. 2016,
arXiv:1604.06174), where a norm plays back the statistics of its first pass: nothing is communicated or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import NormalizationError
from shardkit.normalization.batch_norm import BatchNorm
from shardkit.normalization.tape import Tape


def recompute_blocks(blocks: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Make each block that holds an exact BatchNorm recompute itself in the backward; the names of those blocks.

    The block's `forward` is replaced, so that what a backend hooks around the module (gathering its parameters) also
    happens around the recomputation.
    """
    names = []
    for name, block in blocks:
        if any(isinstance(m, BatchNorm) and m.mode == "exact" for m in block.modules()):
            replace_forward(name, block, _recomputed)
            names.append(name)
    return names


def replace_forward(name: str, block: nn.Module, run: Callable[..., Any]) -> None:
    """Have calls of `block` go to `run(block, ...)`, which finds the block's own forward in its class.

    As a method of this one block, so that a deep copy of the model runs its own blocks.

    Raises:
        NormalizationError: something else has replaced the forward already.
    """
    already = vars(block).get("forward")
    if already is not None and getattr(already, "__func__", None) is not run:
        raise NormalizationError(
            f"normalization: the forward of block {name!r} was replaced already; apply policy exact before, or list "
            "other blocks under exact.blocks"
        )
    block.forward = MethodType(run, block)


def _recomputed(block: nn.Module, *arguments: Any, **named: Any) -> Any:
    forward = MethodType(type(block).forward, block)
    if not (block.training and torch.is_grad_enabled()):
        return forward(*arguments, **named)
    tape = Tape()
    return checkpoint(
        forward,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: (tape.recording(), tape.replaying()),
        **named,
    )
