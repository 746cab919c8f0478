"""Counts what crosses ranks: calls and bytes of each kind of collective, on this rank, without changing what runs.

Every collective of torch.distributed goes through an operator of the namespace c10d, whoever starts it: Python, the
reducer of DistributedDataParallel in C++, fully_shard, functional collectives of DTensor, DeepSpeed. While counting, a
kernel at the dispatch key BackendSelect notes the arguments of each and passes them on; no context excludes that key,
and where nothing is counted no kernel is there. Seen in torch 2.13 on gloo: all of the above, a call costs 80
microseconds more; NCCL takes the same operators, and was not tried.

Not seen: what goes through the store of the process group (rendezvous, monitored barriers' bookkeeping), communication
inside other libraries' own kernels (DeepSpeed's shared-memory op, which shardkit switches off; NVSHMEM), copies to and
from the host, collectives of a group of one rank, which move nothing, and those replayed by a CUDA graph.

Bytes are the size of the full tensor that takes part: of an all_reduce, broadcast or reduce the tensor; of an
all_gather the output; of a reduce_scatter or all_to_all the input; of a gather or scatter what the root holds. What a
link carries follows from the algorithm: a ring moves 2 (n - 1) / n times the bytes of an all_reduce past each of n
ranks, and (n - 1) / n times those of an all_gather or reduce_scatter (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Volume:
    """Collectives of one kind."""

    calls: int | None
    # None where only the bytes are known.
    bytes: int

    def __add__(self, other: Volume) -> Volume:
        calls = None if self.calls is None or other.calls is None else self.calls + other.calls
        return Volume(calls, self.bytes + other.bytes)


Traffic = Mapping[str, Volume]
# Kind -> its volume, as "all_reduce".


class _Operator(NamedTuple):
    """How the bytes of an operator are read."""

    kind: str
    argument: int
    # Which of its arguments is the full tensor,
    times_ranks: bool = False
    # or one rank's part of it.


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", 0),
    "allreduce_coalesced_": _Operator("all_reduce", 0),
    "broadcast_": _Operator("broadcast", 0),
    "reduce_": _Operator("reduce", 0),
    "allgather_": _Operator("all_gather", 0),
    "_allgather_base_": _Operator("all_gather", 0),
    "allgather_coalesced_": _Operator("all_gather", 0),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", 0),
    "reduce_scatter_": _Operator("reduce_scatter", 1),
    "_reduce_scatter_base_": _Operator("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", 1),
    "gather_": _Operator("gather", 1, times_ranks=True),
    "scatter_": _Operator("scatter", 0, times_ranks=True),
    "alltoall_": _Operator("all_to_all", 1),
    "alltoall_base_": _Operator("all_to_all", 1),
    "send": _Operator("send", 0),
    "recv_": _Operator("receive", 0),
    "recv_any_source_": _Operator("receive", 0),
    "barrier": _Operator("barrier", -1),
    "monitored_barrier_": _Operator("barrier", -1),
}


class Counts:
    """What was counted so far."""

    def __init__(self) -> None:
        self._volumes: dict[str, Volume] = {}
        self._paused = 0
        # Backward passes run in threads of their own, one a device.
        self._lock = threading.Lock()

    def add(self, kind: str, size: int) -> None:
        with self._lock:
            if not self._paused:
                self._volumes[kind] = self._volumes.get(kind, Volume(0, 0)) + Volume(1, size)

    def take(self) -> dict[str, Volume]:
        """Kind -> volume since the last call, or the beginning."""
        with self._lock:
            volumes, self._volumes = self._volumes, {}
            return volumes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is counted."""
        with self._lock:
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1


_counting: list[Counts] = []
_kernels: ExitStack | None = None


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the collectives that this process starts within; contexts may be nested."""
    counts = Counts()
    _counting.append(counts)
    _set_kernels()
    try:
        yield counts
    finally:
        _counting.remove(counts)
        _set_kernels()


def added(*traffics: Traffic) -> dict[str, Volume]:
    """The sum, kind by kind."""
    total: dict[str, Volume] = {}
    for traffic in traffics:
        for kind, volume in traffic.items():
            total[kind] = total.get(kind, Volume(0, 0)) + volume
    return total


def _set_kernels() -> None:
    """Have kernels while someone counts."""
    global _kernels
    if _counting and _kernels is None and dist.is_available():
        _kernels = ExitStack()
        library = _kernels.enter_context(torch.library._scoped_library("c10d", "IMPL"))
        for name in _OPERATORS:
            # Later versions may lack some, and have others, which stay uncounted.
            if hasattr(torch.ops.c10d, name):
                library.impl(name, _kernel(name), "BackendSelect", with_keyset=True)
    elif not _counting and _kernels is not None:
        _kernels.close()
        _kernels = None


def _kernel(name: str) -> Callable[..., Any]:
    operator = _OPERATORS[name]
    called = getattr(torch.ops.c10d, name).default
    place = next(i for i, a in enumerate(called._schema.arguments) if a.name == "process_group")
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: Any, *arguments: Any, **more: Any) -> Any:
        ranks = dist.ProcessGroup.unbox(arguments[place]).size()
        if ranks > 1:
            size = _bytes(arguments[operator.argument]) if operator.argument >= 0 else 0
            for counts in tuple(_counting):
                counts.add(operator.kind, size * ranks if operator.times_ranks else size)
        return called.redispatch(keyset & rest, *arguments, **more)

    return kernel


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
