"""Exact large-batch BatchNorm under accumulation: one forward of the whole window, in blocks that are recomputed.

A window's micro-batches are concatenated, so each BatchNorm sees all of this rank's items at once. Memory is brought
back down by recomputing each block that holds norms in the backward (`shardkit.normalization.recomputed`).
"""

from __future__ import annotations

from torch import nn

from shardkit.normalization.batch_norm import BatchNorm


def holds_exact(block: nn.Module) -> bool:
    """Whether a norm of the block has the statistics of the whole logical batch."""
    return any(isinstance(module, BatchNorm) and module.mode == "exact" for module in block.modules())
