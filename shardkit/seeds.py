"""The random streams of a rank: one that is the same on all ranks, then one of its own."""

from __future__ import annotations

import random

import numpy as np
import torch

from shardkit.data.order import stream_seed


def seed_alike(seed: int) -> None:
    """Every rank draws the same from here on: the model's weights, the data sets."""
    _seed(stream_seed("model", seed))


def seed_apart(seed: int, rank: int) -> None:
    """Every rank draws its own from here on: dropout would else repeat itself on all ranks."""
    _seed(stream_seed("rank", seed, rank))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
