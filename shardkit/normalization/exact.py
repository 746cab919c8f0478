"""Exact large-batch BatchNorm under accumulation: one forward of the whole window, in blocks that are recomputed.

A window's micro-batches are concatenated, so each BatchNorm sees all of this rank's items at once. Memory is brought
back down by recomputing each block that holds norms in the backward (non-reentrant checkpointing, Chen et al. 2016,
arXiv:1604.06174), where a norm plays back the statistics of its first pass: nothing is communicated or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

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
            block.forward = _recomputed(block, block.forward)
            names.append(name)
    return names


def _recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
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

    return run


@contextmanager
def on_host(enabled: bool) -> Iterator[None]:
    """Keep what the backward needs in host memory from its forward on; parameters stay where they are."""
    if not enabled:
        yield
        return
    with saved_tensors_hooks(_to_host, _from_host):
        yield


class _Host:
    """A tensor's values in host memory, outside torch's allocator where the device is the host itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device, self.dtype = tensor.device, tensor.dtype
        if tensor.device.type == "cpu":
            # numpy knows no bf16: the bytes are what is kept.
            self.values: Any = tensor.detach().contiguous().view(torch.uint8).numpy().copy()
            self.shape = tensor.shape
            return
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.values.copy_(tensor.detach(), non_blocking=True)

    def tensor(self) -> torch.Tensor:
        if isinstance(self.values, torch.Tensor):
            return self.values.to(self.device, non_blocking=True)
        return torch.from_numpy(self.values).view(self.dtype).reshape(self.shape)


# Smaller tensors are not worth a transfer: statistics, scalars, targets.
SMALLEST = 2**16


def _to_host(tensor: torch.Tensor) -> torch.Tensor | _Host:
    base = tensor._base if tensor._base is not None else tensor
    # A leaf that requires a gradient is a parameter, and backends move parameters themselves.
    parameter = base.requires_grad and base.is_leaf
    if parameter or tensor.numel() * tensor.element_size() < SMALLEST or type(tensor) is not torch.Tensor:
        return tensor
    return _Host(tensor)


def _from_host(kept: torch.Tensor | _Host) -> torch.Tensor:
    return kept.tensor() if isinstance(kept, _Host) else kept
