"""The random streams of a rank: one that is the same on all ranks, then one of its own."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch

from shardkit.data.order import stream_seed


def seed_alike(seed: int) -> None:
    """Every rank draws the same from here on: the model's weights, the data sets."""
    _seed(stream_seed("model", seed))


def seed_apart(seed: int, rank: int, step: int = 0) -> None:
    """Every rank draws its own from here on: dropout would else repeat itself on all ranks.

    `step` is that of a run that goes on with another number of ranks, which cannot go on with their streams.
    """
    _seed(stream_seed("rank", seed, rank, step) if step else stream_seed("rank", seed, rank))


def read_streams(device: torch.device) -> bytes:
    """Where this process's streams stand (torch on the CPU and on `device`, numpy, random), as JSON."""
    kind, keys, *numpy = np.random.get_state()
    version, state, gauss = random.getstate()
    streams: dict[str, Any] = {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "numpy": [kind, _text(np.asarray(keys, dtype="<u4").tobytes()), *numpy],
        "random": [version, list(state), gauss],
    }
    if device.type == "cuda":
        streams["cuda"] = _text(torch.cuda.get_rng_state(device).numpy().tobytes())
    return json.dumps(streams).encode()


def write_streams(data: bytes, device: torch.device) -> None:
    """Put this process's streams where `read_streams` found them."""
    streams = json.loads(data)
    torch.set_rng_state(_bytes(streams["torch"]))
    kind, keys, *numpy = streams["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype="<u4"), *numpy))
    version, state, gauss = streams["random"]
    random.setstate((version, tuple(state), gauss))
    if device.type == "cuda" and "cuda" in streams:
        torch.cuda.set_rng_state(_bytes(streams["cuda"]), device)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
