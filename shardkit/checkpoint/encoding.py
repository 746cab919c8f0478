"""Python values as JSON and back: what schedulers and optimizers keep besides tensors, without a pickle."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch

from shardkit.checkpoint.tensors import DTYPES, dtype_name
from shardkit.errors import CheckpointError

DEEPEST = 100
# Levels of lists and mappings in what is kept.
_TAGS = ("!float", "!tuple", "!dict", "!counter", "!tensor")


def encode(value: Any, where: str = "value") -> Any:
    """`value` as what `json.dumps(..., allow_nan=False)` takes.

    Args:
        value: None, bool, int, float (infinite and NaN too), str, list, tuple, dict, Counter, small tensors, numpy
            scalars, and these inside each other.
        where: names it in the error.

    Raises:
        CheckpointError: there is something else in it.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"!float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"!tensor": [dtype_name(value.dtype), encode(value.detach().cpu().tolist(), where)]}
    if isinstance(value, list):
        return [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if type(value) is tuple:
        return {"!tuple": [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]}
    if isinstance(value, Counter):
        return {"!counter": [[encode(key, where), count] for key, count in value.items()]}
    if type(value) in (dict, OrderedDict):
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {key: encode(each, f"{where}.{key}") for key, each in value.items()}
        return {"!dict": [[encode(key, where), encode(each, f"{where}[{key!r}]")] for key, each in value.items()]}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored without a pickle; "
        "keep numbers, texts, lists and mappings of them"
    )


def decode(value: Any) -> Any:
    """What `encode` was given; data only, nothing of it is ever run.

    Raises:
        CheckpointError: `encode` made no such thing.
    """
    try:
        return _decode(value)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint holds a value that cannot be read: {error}") from error


def check_depth(value: Any, deepest: int = DEEPEST) -> None:
    """Lists and mappings lie inside each other no deeper than a reader can go.

    Raises:
        ValueError: they do.
    """
    level = [value]
    for _ in range(deepest):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"lists and mappings lie inside each other more than {deepest} deep")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _TAGS:
        return _tagged(tag, value[tag])
    return {key: _decode(each) for key, each in value.items()}


def _tagged(tag: str, content: Any) -> Any:
    if tag == "!float":
        return float(content)
    if tag == "!tensor":
        return torch.tensor(_decode(content[1]), dtype=DTYPES[content[0]])
    if tag == "!tuple":
        return tuple(_decode(each) for each in content)
    pairs = {_decode(key): _decode(each) for key, each in content}
    return Counter(pairs) if tag == "!counter" else pairs
