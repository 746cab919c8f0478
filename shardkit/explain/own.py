"""What shardkit itself moves between ranks in a step, whatever the backend, from sizes alone."""

from __future__ import annotations

from collections.abc import Iterable

from shardkit.communication import Traffic, Volume, added
from shardkit.normalization.batch_norm import BatchNorm

WIDE = 8
# Bytes of the fp64 that counts, losses and moments are in.


def own_traffic(layers: Iterable[BatchNorm], *, world_size: int, micro_steps: int) -> Traffic:
    """Per optimizer step: the normaliser, the loss, and what norm layers share.

    The normaliser is an all-reduce of four fp64 numbers before the window, the loss one of one after it (in steps that
    write a line). A layer whose statistics are over ranks all-gathers (1 + 2 C) fp64 numbers of each rank in a forward
    and all-reduces 2 C fp32 ones in a backward; deferred layers share one all-gather of all theirs a step.
    """
    if world_size == 1:
        return {}
    found: list[Traffic] = [{"all_reduce": Volume(2, 5 * WIDE)}]
    own = 0
    for layer in layers:
        gathered = (1 + 2 * layer.num_features) * WIDE * world_size
        if layer.over_ranks:
            found.append({"all_gather": Volume(micro_steps, gathered * micro_steps)})
            found.append({"all_reduce": Volume(micro_steps, 2 * layer.num_features * 4 * micro_steps)})
        elif layer.mode == "deferred":
            own += gathered
    if own:
        found.append({"all_gather": Volume(1, own)})
    return added(*found)
