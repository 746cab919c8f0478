"""Every sample exactly once an epoch, at sizes that do not divide, on every backend (recipes/digits-resnet.yaml)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.conformance.conftest import backend_named


def test_every_sample_is_seen_exactly_once_an_epoch(
    launch_ranks: Callable[..., list[Any]], backend: str, world: int
) -> None:
    ranks = launch_ranks(world, "run_ledger", backend_named(backend))
    for epoch in range(2):
        seen = Counter(number for rank in ranks for number in rank["epochs"][epoch])
        assert seen == Counter(range(ranks[0]["items"]))
    # Two epochs have two orders, and every rank made as many micro-steps.
    assert ranks[0]["epochs"][0] != ranks[0]["epochs"][1]
    assert len({rank["micro_steps"] for rank in ranks}) == 1
    # The same windows at every world size: items of a window are a matter of (seed, epoch) alone.
    windows = [
        sorted(number for rank in ranks for number in rank["windows"][i]) for i in range(len(ranks[0]["windows"]))
    ]
    assert windows == sorted_windows(ranks[0]["items"])
    assert len({rank["eval items"] for rank in ranks}) == 1 and ranks[0]["eval items"] == 360


# 300 items are whole micro-steps of 50 on 1, 2 and 3 processes.
test_every_sample_is_seen_exactly_once_an_epoch.where = {  # type: ignore[attr-defined]
    "quick": [({"fsdp2", "zero3"}, (2,))],
    "slow": [(None, (1, 2, 3))],
}


def sorted_windows(items: int) -> list[list[int]]:
    from shardkit.data.order import GlobalOrder

    order = GlobalOrder(num_items=items, global_batch_size=300, seed=0)
    return [sorted(window) for epoch in range(2) for window in order.windows(epoch)]
