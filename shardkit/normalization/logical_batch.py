"""How a model's norms take part in a logical batch: what `train_step` has to know of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkit.normalization.batch_norm import BatchNorm
from shardkit.normalization.report import Applied


@dataclass(kw_only=True)
class LogicalBatch:
    """The norms of a model whose statistics belong to the window, and whether it runs as one batch."""

    applied: Applied
    # What the policy did to each layer.
    joined: bool = False
    # The micro-batches of a rank are concatenated into one forward (policy exact).
    on_host: bool | Literal["auto"] = False
    # Saved tensors wait for the backward in host memory; auto = when the device has little left.

    items_seen: float = 0.0
    # Of this rank, in training, since its running statistics were last merged with the others'.

    @property
    def layers(self) -> tuple[BatchNorm, ...]:
        """Those of shardkit's own, which commit their running statistics at the end of a window."""
        return self.applied.layers
