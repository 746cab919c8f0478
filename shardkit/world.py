"""The ranks of a run: who this process is, its device, and the few collectives shardkit itself needs.

This is the only module that reads the rank environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardkit.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that train one model together.

    `size` is 1 for a run of one process, with or without a process group.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None
    # The process group of its collectives; None = the default one.

    @classmethod
    def current(cls, device: str = "auto") -> World:
        """The world torch.distributed was initialised with, or one process."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = resolve_device(device, local_rank)
        if not dist.is_initialized():
            return cls(device=chosen)
        return cls(rank=dist.get_rank(), local_rank=local_rank, size=dist.get_world_size(), device=chosen)

    @property
    def distributed(self) -> bool:
        return dist.is_initialized()

    @property
    def timeout(self) -> timedelta | None:
        """That of the ranks' own group, which `new_group` does not take over; None = torch's default."""
        backend = dist.group.WORLD._get_backend(self.device) if dist.group.WORLD is not None else None
        return getattr(getattr(backend, "options", None), "_timeout", None)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over the ranks, in place; the same tensor in a world of one."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The `tensor` of every rank, which has the same shape on all, along a new first dim of `size`."""
        if self.size == 1:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.stack(parts)

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank, in rank order. Not for hot paths."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, value: Any) -> list[Any]:
        """The picklable `value` of every rank, in rank order, on rank 0; nothing elsewhere. Not for hot paths."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def aside(self) -> World:
        """The same ranks over a gloo group of their own, whose collectives another thread may use meanwhile."""
        if self.size == 1:
            return self
        return replace(self, device=torch.device("cpu"), group=dist.new_group(backend="gloo", timeout=self.timeout))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's `tensor` on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self.group)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)


def resolve_device(device: str, local_rank: int) -> torch.device:
    """`auto`, `cpu` or `cuda` as this rank's device.

    Raises:
        RequestError: CUDA is asked for and torch sees none.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise RequestError("launch.device: cuda was asked for, but torch sees no CUDA device; use auto or cpu")
    if device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextmanager
def join(device: str = "auto", timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the ranks named by RANK, WORLD_SIZE and MASTER_ADDR; one process when they are absent.

    The group is left when the block ends normally. After an error it is not: a collective teardown would wait for
    ranks that may never come, and the launcher ends them anyway.

    The block takes some 50 ms to end, so that the process may end right after it: gloo's threads need the
    GIL to let go of the tensors of their last collective, and one that asks for it while Python is already shutting
    down is unwound through C++ and aborts the rank ("terminate called without an active exception"; torch 2.13).
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = resolve_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "RANK" in os.environ:
        dist.init_process_group(
            # gloo beside NCCL, for the few small tensors that live on the host.
            "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_seconds),
            rank=int(os.environ["RANK"]),
            world_size=world_size,
        )
    yield World.current(device)
    if dist.is_initialized():
        dist.destroy_process_group()
        for _ in range(10):
            time.sleep(0.005)  # each time the GIL is free, even where the threads together have little of a CPU
