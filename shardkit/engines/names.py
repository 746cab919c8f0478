"""Full names: the model's own names of its parameters and buffers, without what a wrapper puts in front."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

# Components that wrappers add: DDP and DeepSpeed "module", torch.compile "_orig_mod", activation checkpointing.
_CHECKPOINT = "_checkpoint_wrapped_module."
_COMPILED = "_orig_mod."


def full_name(name: str) -> str:
    """`name` without the components that torch.compile and activation checkpointing insert.

    A user's own module may be called `module`, so that one is never stripped: adapters name the unwrapped model.
    """
    return name.replace(_CHECKPOINT, "").replace(_COMPILED, "")


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(full name, parameter) of what requires a gradient; a tied parameter once, under its first name."""
    return [(full_name(name), p) for name, p in model.named_parameters() if p.requires_grad]


def frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(full name, parameter) of what does not require a gradient; a tied parameter once."""
    return [(full_name(name), p) for name, p in model.named_parameters() if not p.requires_grad]


def tied_names(model: nn.Module) -> dict[str, str]:
    """The other full names of tied parameters -> the first, under which they are kept."""
    first: dict[int, str] = {}
    named = [(full_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: kept for name, p in named if (kept := first.setdefault(id(p), name)) != name}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(full name, buffer) of the buffers that belong to the state dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield full_name(f"{prefix}.{name}" if prefix else name), buffer
