"""Which blocks of a model are recomputed in the backward: those that the recipe chooses, and those of exact norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from shardkit.engines.units import find_units
from shardkit.errors import BackendError
from shardkit.normalization.exact import holds_exact
from shardkit.normalization.recomputed import Recomputed, replace_forward
from shardkit.recipe.schema import ActivationCheckpointing, Normalization

KEY = "activation_checkpointing"


def chosen_blocks(
    model: nn.Module, blocks: Sequence[str], activation_checkpointing: ActivationCheckpointing
) -> list[tuple[str, nn.Module]]:
    """(name, module) of the sharding units that the setting chooses: all, or every n-th from the first on.

    Args:
        model: bare.
        blocks: globs on the units; empty = found.
        activation_checkpointing: as in the recipe.

    Raises:
        BackendError: there are none to choose from, or a glob matches nothing.
    """
    if activation_checkpointing == "none":
        return []
    units = find_units(model, blocks)
    if not units:
        raise BackendError(
            f"{KEY}: no blocks are found in {type(model).__name__}, which holds no ModuleList or Sequential of several "
            f"modules; list what is to be recomputed under `blocks`, as globs on module or class names, or leave {KEY} "
            "out"
        )
    return units[:: 1 if activation_checkpointing == "blocks" else activation_checkpointing]


def recomputed_blocks(
    model: nn.Module,
    section: Normalization,
    blocks: Sequence[str],
    activation_checkpointing: ActivationCheckpointing,
) -> list[tuple[nn.Module, Recomputed]]:
    """What is recomputed; a block that policy exact recomputes is not once more.

    Args:
        model: bare, after the normalization policy.
        section: the recipe's.
        blocks: globs on the sharding units; empty = found.
        activation_checkpointing: as in the recipe.

    Raises:
        BackendError: there are no blocks, a glob matches nothing, or a block holds one that exact recomputes.
    """
    found: dict[str, tuple[nn.Module, Recomputed]] = {}
    if section.exact.memory == "blocks" and holds_exact(model):
        for name, block in find_units(model, section.exact.blocks or blocks):
            if holds_exact(block):
                how = Recomputed(name=name, key="normalization.policy=exact", blocks="normalization.exact.blocks")
                found[name] = block, how
    exact = tuple(found)
    for name, block in chosen_blocks(model, blocks, activation_checkpointing):
        if any(f"{name}.".startswith(f"{other}.") for other in exact):
            continue
        inner = next((other for other in exact if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise BackendError(
                f"{KEY}: block {name!r} holds {inner!r}, which normalization.exact.blocks names and policy exact "
                "recomputes: it would be computed three times; name the same under blocks and exact.blocks"
            )
        found[name] = block, Recomputed(name=name, key=KEY)
    return list(found.values())


def recompute(blocks: Iterable[tuple[nn.Module, Recomputed]]) -> None:
    """Make each of these blocks recompute itself in the backward, whatever backend wraps the model.

    Raises:
        BackendError: something else has replaced the forward of one.
    """
    for block, how in blocks:
        replace_forward(block, how, name=how.name, key=how.key, blocks=how.blocks)
