"""The loader: a rank's micro-batches in windows, with the same number of forwards on every rank."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardkit.data.item_streams import on_streams_of_their_own
from shardkit.data.order import GlobalOrder, rank_cells, stream_seed
from shardkit.errors import DataError
from shardkit.parent import end_with_parent

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward of one rank sees."""

    batch: Any
    # As the collate function made it, on this rank's device.
    filler: bool = False
    # True where the window has no items left for this rank: a copy of its first item, which must count zero.
    indices: tuple[int, ...]
    # Sample numbers; empty for a filler.


class Windows:
    """The windows of one rank over a map-style data set: `for window in windows.epoch(0)`.

    Raises:
        DataError: the data set is not map-style, or not the one `order` was made for.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        order: GlobalOrder,
        world_size: int = 1,
        rank: int = 0,
        micro_batch_size: int,
        num_workers: int = 0,
        collate: Collate | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        size = num_items(dataset)
        if size != order.num_items:
            raise DataError(f"the data set has {size} items, but the order was made for {order.num_items}")
        self.order = order
        self._dataset = dataset
        self._place = {"world_size": world_size, "rank": rank, "micro_batch_size": micro_batch_size}
        self._num_workers = num_workers
        self._collate = collate
        self._device = torch.device(device)
        self._seed = seed

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[MicroBatch]]:
        """The windows of `epoch` in order, each a list of as many micro-batches as on every other rank.

        With `start` they go on from that sample position; nothing is made or drawn for the samples before it.

        Each item is made under random streams of its own (torch, numpy, random), a function of (seed, epoch, item
        number): it is the same at every world size and number of workers. The streams the model draws from are
        neither read nor moved.
        """
        planned, ahead = itertools.tee(self._cells(epoch, start))
        stream = ("items", self._seed, epoch)
        loader = DataLoader(
            on_streams_of_their_own(self._dataset, stream),
            batch_sampler=(list(cell or first) for cells, first in ahead for cell in cells),
            num_workers=self._num_workers,
            # Children of this process, which end with it; Python 3.14 would have a server of its own start them.
            multiprocessing_context="fork" if self._num_workers and sys.platform == "linux" else None,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=functools.partial(_start_worker, self._dataset, os.getpid()),
            # Without one of its own, DataLoader draws a seed from the stream the model draws from.
            generator=torch.Generator().manual_seed(stream_seed(*stream)),
        )
        batches = _started(loader)
        for cells, _ in planned:
            # Once a window: reading and writing the states takes 0.1 ms.
            with nullcontext() if self._num_workers else _streams_kept():
                made = [next(batches) for _ in cells]
            yield [
                MicroBatch(batch=move(batch, self._device), filler=not cell, indices=tuple(cell))
                for batch, cell in zip(made, cells, strict=True)
            ]

    def _cells(self, epoch: int, start: int) -> Iterator[tuple[list[Sequence[int]], Sequence[int]]]:
        """This rank's cells of each window, and what fills the empty ones."""
        for window in self.order.windows(epoch, start):
            yield rank_cells(window, **self._place), window[:1]


def num_items(dataset: Any) -> int:
    """How many items a map-style data set has.

    Raises:
        DataError: it is not map-style.
    """
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not map_style:
        raise DataError(
            f"{type(dataset).__name__} is not a map-style data set: shardkit needs __len__ and __getitem__, "
            "because each rank reads its own items of one global order; put the items of a stream in a list, "
            "or in a file that can be read by number"
        )
    return len(dataset)


def move(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`, inside containers, dataclasses and what has a `to` as well."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=device.type == "cuda")
        return value.to(device)

    return mapped(value, moved)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with what `change` makes of its tensors and of what has a `to`, inside containers and dataclasses."""
    if isinstance(value, torch.Tensor) or callable(getattr(value, "to", None)):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            # Past the __setattr__ that a frozen dataclass refuses with.
            object.__setattr__(changed, field.name, mapped(getattr(value, field.name), change))
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def _start_worker(dataset: Any, rank_process: int, worker: int) -> None:
    """Leave signals to the rank, end with it, and let `get_worker_info` know the user's data set.

    A signal to the whole process group is meant for the ranks: they save and stop, and need their loaders
    to do it.
    """
    end_with_parent(rank_process)
    object.__setattr__(get_worker_info(), "dataset", dataset)  # past the frozen dataclass
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of `loader`, whose processes end with them, or with this process.

    At exit multiprocessing sends its children a SIGTERM, which these ignore, and waits for them: without a
    kill, an error in the training process would hang it.
    """
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    workers = set(multiprocessing.active_children()) - others
    Finalize(batches, _kill, args=(workers,), exitpriority=100)
    return batches


def _kill(workers: set[BaseProcess]) -> None:
    running = [worker for worker in workers if worker.is_alive()]
    if not running or threading.current_thread() is not threading.main_thread():
        return
    # torch's own handler would raise here that a worker was killed.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in running:
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, handler)


@contextmanager
def _streams_kept() -> Iterator[None]:
    """The process's global CPU streams are afterwards what they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
