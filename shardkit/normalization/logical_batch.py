"""How a model's norms take part in a logical batch: what `train_step` has to know of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.normalization.batch_norm import BatchNorm


@dataclass(frozen=True, kw_only=True)
class LogicalBatch:
    """The layers whose statistics belong to the window, and whether it runs as one batch."""

    layers: tuple[BatchNorm, ...] = ()
    # Those that commit their running statistics at its end.
    joined: bool = False
    # The micro-batches of a rank are concatenated into one forward (policy exact).
    on_host: bool = False
    # Saved tensors wait for the backward in host memory.
