"""Random streams of items: what an item draws is a function of (seed, epoch, item number) alone.

So augmentations are the same at every world size, number of workers and micro-batch size, and after a resume.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from shardkit.data.order import stream_seed

Stream = tuple[int | str, ...]


def on_streams_of_their_own(dataset: Any, stream: Stream) -> Any:
    """`dataset` for a DataLoader, with the global streams seeded before each item by `stream` and its number.

    One that makes several items at once is asked so, and seeded by the first of them.
    """
    return (_Batched if _makes_several(dataset) else _Items)(dataset, stream)


class _Items:
    def __init__(self, dataset: Any, stream: Stream) -> None:
        self._dataset = dataset
        self._stream = stream

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        _seed(stream_seed(*self._stream, index))
        return self._dataset[index]


class _Batched(_Items):
    # A class of its own: DataLoader looks whether there is such a method.
    def __getitems__(self, indices: Sequence[int]) -> Any:
        _seed(stream_seed(*self._stream, indices[0]))
        return self._dataset.__getitems__(indices)


def _makes_several(dataset: Any) -> bool:
    """Whether the data set makes several items at once; a Subset does it only if what it is a part of does."""
    method = getattr(dataset, "__getitems__", None)
    if isinstance(dataset, Subset) and getattr(method, "__func__", None) is Subset.__getitems__:
        return _makes_several(dataset.dataset)
    return bool(method)


def _seed(seed: int) -> None:
    """Seed the three global CPU streams, in 10 us; torch.manual_seed, which asks all devices, takes 140 alone.

    torch and numpy make the same numbers of the same 32 bits, so each gets its own.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed >> 31)
    random.seed(seed)
