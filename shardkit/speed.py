"""How fast a rank's device is, measured on the spot: matrix products, memory, host memory, and links between ranks.

All ranks measure at the same time, as they compute at the same time: on a CPU they share its cores and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardkit.world import World

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Sizes that a second or so is enough for: rows of a square matrix, bytes that are copied and reduced.
ROWS = {"cpu": {"fp32": 1024, "bf16": 512, "fp16": 256}, "cuda": dict.fromkeys(PRECISIONS, 8192)}
BYTES = {"cpu": 2**25, "cuda": 2**28}
AT_LEAST = 0.05
# Seconds that are timed of each.


def measured(world: World) -> dict[str, Any]:
    """What the ranks find on the average; the same on every rank. Operations and bytes a second.

    Links are None in a world of one rank.
    """
    own = {
        "kind": world.device.type,
        "flops": {name: _matmul(world, name, dtype) for name, dtype in PRECISIONS.items()},
        "memory_bandwidth": _copy(world),
        "host_bandwidth": _to_device(world),
        "link_bandwidth": _all_reduce(world) if world.size > 1 else None,
    }
    found = world.gather(own)

    def mean(*keys: str) -> float:
        values = []
        for each in found:
            for key in keys:
                each = each[key]
            values.append(each)
        return sum(values) / len(values)

    return {
        **own,
        "flops": {name: mean("flops", name) for name in PRECISIONS},
        "memory_bandwidth": mean("memory_bandwidth"),
        "host_bandwidth": mean("host_bandwidth"),
        "link_bandwidth": mean("link_bandwidth") if world.size > 1 else None,
    }


def _matmul(world: World, name: str, dtype: torch.dtype) -> float:
    rows = ROWS[world.device.type][name]
    left = torch.ones(rows, rows, dtype=dtype, device=world.device)
    out = torch.empty_like(left)
    return 2 * rows**3 / _seconds(world, lambda: torch.mm(left, left, out=out))


def _copy(world: World) -> float:
    """Bytes read and written."""
    source = torch.ones(BYTES[world.device.type] // 4, device=world.device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _seconds(world, lambda: target.copy_(source))


def _to_device(world: World) -> float:
    """Bytes from host memory to the device."""
    pinned = world.device.type == "cuda"
    source = torch.ones(BYTES[world.device.type] // 4, pin_memory=pinned)
    target = torch.empty(source.shape, device=world.device)
    return source.numel() * 4 / _seconds(world, lambda: target.copy_(source))


def _all_reduce(world: World) -> float:
    """Bytes past a link of a ring, which are 2 (n - 1) / n of those that are reduced."""
    tensor = torch.zeros(BYTES[world.device.type] // 4, device=world.device)
    world.sum(tensor)
    _wait(world)
    # As often on every rank.
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        world.sum(tensor)
        _wait(world)
        times.append(time.perf_counter() - begun)
    return 2 * (world.size - 1) / world.size * tensor.numel() * 4 / min(times)


def _seconds(world: World, what: Callable[[], object]) -> float:
    """Of one call, on the average of enough of them."""
    what()
    _wait(world)
    count, taken = 1, 0.0
    while taken < AT_LEAST:
        count = count * 2 if taken else count
        begun = time.perf_counter()
        for _ in range(count):
            what()
        _wait(world)
        taken = time.perf_counter() - begun
    return taken / count


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
