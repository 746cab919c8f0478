"""The recipe's model as every backend gets it, looked at without memory for its weights where that is possible."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardkit.engines.activations import recomputed_blocks
from shardkit.engines.anatomy import Anatomy, anatomy
from shardkit.engines.names import persistent_buffers, trainable
from shardkit.errors import Problem, RecipeError
from shardkit.normalization.auto import recommend
from shardkit.normalization.policy import apply_policy
from shardkit.normalization.report import Applied
from shardkit.optimizer import grouped
from shardkit.recipe.build import build
from shardkit.recipe.load import Loaded
from shardkit.recipe.schema import Recipe
from shardkit.world import World


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Tensors of one kind that a checkpoint holds."""

    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the recipe's model and optimizer are."""

    model: nn.Module
    # With the policy applied.
    built_on: str
    # "meta device", or "CPU" with the reason.
    anatomy: Anatomy
    applied: Applied
    recomputed: tuple[str, ...]
    # Names of the blocks that are recomputed in the backward.
    buffers: Kept
    optimizer: Kept | None
    # What it keeps after a step, in the dtype of the parameters; None = it could not be tried.
    optimizer_dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bare:
    """A recipe's model before any backend."""

    model: nn.Module
    built_on: str
    # "meta device", or "CPU" with the reason.
    applied: Applied


def bare_model(loaded: Loaded, *, world_size: int, accumulation: int) -> Bare:
    """Build the model and apply the policy.

    Raises:
        RequestError: the model cannot be built, or a norm layer cannot become what the policy says.
    """
    model, built_on = _build(loaded)
    applied = _normalize(model, loaded.recipe, world_size, accumulation)
    if loaded.recipe.train.precision == "bf16-true":
        model.to(torch.bfloat16)
    return Bare(model=model, built_on=built_on, applied=applied)


def look(loaded: Loaded, *, world_size: int, accumulation: int) -> Subject:
    """Build the model, apply the policy, and try the optimizer.

    Raises:
        RequestError: the model cannot be built, a norm layer cannot become what the policy says, a glob matches
            nothing, there are no blocks to recompute.
    """
    recipe = loaded.recipe
    bare = bare_model(loaded, world_size=world_size, accumulation=accumulation)
    model = bare.model
    blocks = recomputed_blocks(model, recipe.normalization, recipe.blocks, recipe.activation_checkpointing)
    groups, optimizer = _optimize(model, recipe)
    state = None if optimizer is None else _tried(optimizer)
    return Subject(
        model=model,
        built_on=bare.built_on,
        anatomy=anatomy(model, recipe.blocks, groups, [block for block, _ in blocks]),
        applied=bare.applied,
        recomputed=tuple(how.name for _, how in blocks),
        buffers=_kept([buffer for _, buffer in persistent_buffers(model)]),
        optimizer=None if state is None else _kept(state),
        optimizer_dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in state or ()})),
    )


def _build(loaded: Loaded) -> tuple[nn.Module, str]:
    """The bare model, and where it lies."""
    target = loaded.recipe.model
    try:
        with torch.device("meta"):
            model = build(target)
        if isinstance(model, nn.Module) and all(t.is_meta for t in (*model.parameters(), *model.buffers())):
            return model, "the meta device: no memory for weights"
        why = "it makes tensors on another device"
    except Exception as error:  # models may look at their weights while they are made, which meta tensors have not
        why = f"on the meta device it raises {type(error).__name__}"
    try:
        model = build(target)
    except Exception as error:
        message = f"cannot be built: {type(error).__name__}: {error}"
        raise RecipeError([Problem(place=loaded.place("model"), key="model", message=message)]) from error
    if not isinstance(model, nn.Module):
        message = f"{target['_target_']} made {type(model).__name__}; expected a torch.nn.Module"
        raise RecipeError([Problem(place=loaded.place("model"), key="model", message=message)])
    return model, f"the CPU: {why}"


def _normalize(model: nn.Module, recipe: Recipe, world_size: int, accumulation: int) -> Applied:
    """The policy for `world_size` ranks, applied in this one process."""
    section, explanation = recipe.normalization, ""
    if section.policy == "auto":
        policy, explanation = recommend(
            model,
            world_size=world_size,
            micro_batch_size=recipe.batch.micro_batch_size,
            accumulation=accumulation,
            pretrained=section.pretrained,
            spatial_size=None,
        )
        section = replace(section, policy=policy)
    # It warns of each layer that it leaves, which the explanation says too.
    logging.disable(logging.WARNING)
    try:
        applied = apply_policy(model, section, world=World())
    finally:
        logging.disable(logging.NOTSET)
    return replace(applied, explanation=explanation)


def optimizer_groups(model: nn.Module, recipe: Recipe) -> list[list[str]]:
    """The full names of the parameters in each of the groups of the recipe's optimizer."""
    return _optimize(model, recipe)[0]


def _optimize(model: nn.Module, recipe: Recipe) -> tuple[list[list[str]], torch.optim.Optimizer | None]:
    """The names in the optimizer's groups, and the optimizer; None where it cannot be built."""
    named = trainable(model)
    names = {id(parameter): name for name, parameter in named}
    given = grouped(named, recipe.parameter_groups)
    try:
        optimizer = build(recipe.optimizer, given)
    except Exception:  # as fused ones, which want their parameters on a device
        groups = [group["params"] for group in given] if recipe.parameter_groups else [given]
        return [[names[id(p)] for p in group] for group in groups], None
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups], optimizer


def _tried(optimizer: torch.optim.Optimizer) -> list[torch.Tensor] | None:
    """The tensors it keeps after a step on gradients of zero; None where meta tensors are not enough for it."""
    if not all(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        # No second copy of a model that takes memory already.
        for group in optimizer.param_groups:
            group["params"] = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    except Exception:  # an optimizer of the user's choice may read its numbers
        return None
    kept: list[Mapping[str, Any]] = list(optimizer.state.values())
    return [value for state in kept for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]


def _kept(tensors: list[torch.Tensor]) -> Kept:
    return Kept(tensors=len(tensors), bytes=sum(t.numel() * t.element_size() for t in tensors))
