"""Open an engine: from a backend's name or mapping to a wrapped model with its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from shardkit.engines import registry
from shardkit.engines.activations import KEY, chosen_blocks, recompute, recomputed_blocks
from shardkit.engines.api import Engine, EngineSettings, MakeOptimizer, NamedParameters, Precision, Traits
from shardkit.engines.checks import constant_refusal, optimizer_refusal, refusals
from shardkit.engines.names import tied_names
from shardkit.engines.start import NOTHING_TRAINED, same_start, take_inputs_as
from shardkit.engines.units import find_units
from shardkit.errors import BackendError
from shardkit.normalization.logical_batch import LogicalBatch
from shardkit.normalization.policy import apply_policy
from shardkit.normalization.slices import slice_blocks
from shardkit.recipe.backend import load_backend
from shardkit.recipe.build import make_options
from shardkit.recipe.schema import (
    ActivationCheckpointing,
    Backend,
    Normalization,
    Policy,
    activation_checkpointing_refusal,
)
from shardkit.world import World


def open_engine(
    backend: str | Mapping[str, Any] | Backend,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    world: World | None = None,
    max_grad_norm: float | None = None,
    precision: Precision = "fp32",
    blocks: Sequence[str] = (),
    activation_checkpointing: ActivationCheckpointing = "none",
    normalization: Policy | Literal["auto"] | Normalization = "keep",
    micro_batch_size: int = 1,
    gradient_accumulation_steps: int = 1,
) -> Engine:
    """Wrap `model` for `backend` and build its optimizer.

    Args:
        backend: a name from backends/, a path to such a file, "my_package.module:MyEngine", or a mapping
            `{"adapter": ..., "options": {...}}`.
        model: on the CPU, in fp32; each rank gets rank 0's parameters and buffers. Changed in place.
        make_optimizer: given (full name, parameter) pairs, returns the torch optimizer; called after wrapping where
            wrapping replaces parameters.
        world: the ranks; by default torch.distributed's, or one process.
        max_grad_norm: clip by the global norm; None = no clipping.
        precision: fp32, bf16-mixed or bf16-true; see the recipe's train.precision.
        blocks: globs on module or class names that are sharded as one unit each; empty = found in the model.
        activation_checkpointing: what is recomputed in the backward instead of kept, on every backend alike: "none",
            "blocks" (each sharding unit), or n (every n-th of them, from the first on).
        normalization: what becomes of BatchNorm layers: a policy, or the recipe's section; see
            `shardkit.normalization.apply_policy`.
        micro_batch_size: items a forward of one rank; told to backends that want to know, and to policy auto.
        gradient_accumulation_steps: micro-batches of one rank in a window; told to policy auto.

    Raises:
        RecipeError: there is no such backend, or it has no such option.
        BackendError: the backend is not installed, or cannot honour a setting here; there are no blocks to recompute.
        NormalizationError: a norm layer would lose something under the policy.
    """
    chosen = backend if isinstance(backend, Backend) else load_backend(backend, options_of=registry.options_of)
    world = world or World.current()
    adapter = registry.load(chosen.adapter)
    options = make_options(chosen, adapter.Options)
    traits = adapter.describe(options)
    problems = refusals(traits, chosen.name, device=world.device.type, size=world.size, precision=precision)
    if problems:
        raise BackendError("\n".join(message for _, message in problems))
    if traits.needs_process_group and not world.distributed:
        raise BackendError(
            f"backend {chosen.name!r} needs a process group, and this process joined none; start with "
            "`python -m shardkit.launch` or `torchrun`, or enter `shardkit.join()` first"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BackendError(NOTHING_TRAINED)
    if blocks:
        # Also where they are not used: a typo must not wait for another backend to be found.
        find_units(model, blocks)
    section = normalization if isinstance(normalization, Normalization) else Normalization(policy=normalization)
    refused = activation_checkpointing_refusal(activation_checkpointing, section.exact)
    if refused:
        raise BackendError(f"{KEY}: {refused}")
    chosen_blocks(model, blocks, activation_checkpointing)
    same_start(model, world)
    if precision == "bf16-true":
        take_inputs_as(model, torch.bfloat16)
    settings = EngineSettings(
        world=world,
        max_grad_norm=max_grad_norm,
        precision=precision,
        blocks=tuple(blocks),
        micro_batch_size=micro_batch_size,
    )
    refused = constant_refusal(traits, chosen.name, section)
    if refused:
        raise BackendError(refused)
    norms = normalize(model, section, settings, gradient_accumulation_steps)
    # Before any backend wraps the model, and after the policy, which may have made other modules of some blocks.
    recompute(recomputed_blocks(model, section, blocks, activation_checkpointing))
    aliases = tied_names(model)
    groups: list[tuple[str, ...]] = []
    engine = adapter(model, _checked(make_optimizer, traits, chosen.name, groups), settings, options)
    engine.norms, engine.groups = norms, tuple(groups)
    engine.name, engine.aliases = chosen.name, aliases
    return engine


def normalize(
    model: nn.Module, section: Normalization, settings: EngineSettings, gradient_accumulation_steps: int
) -> LogicalBatch:
    """Apply the policy to the bare model; under exact at constant memory, its blocks run a micro-batch at a time."""
    applied = apply_policy(
        model,
        section,
        world=settings.world,
        micro_batch_size=settings.micro_batch_size,
        accumulation=gradient_accumulation_steps,
    )
    exact = any(layer.mode == "exact" for layer in applied.layers)
    constant = section.exact.memory == "constant"
    if exact and constant:
        slice_blocks(find_units(model, section.exact.blocks or settings.blocks))
    return LogicalBatch(applied=applied, joined=exact, on_host=exact and (constant or section.exact.offload))


def _checked(make_optimizer: MakeOptimizer, traits: Traits, name: str, groups: list[tuple[str, ...]]) -> MakeOptimizer:
    """`make_optimizer` with its result looked at; `groups` gets the names, as backends exchange the parameters."""

    def build(named: NamedParameters) -> torch.optim.Optimizer:
        optimizer = make_optimizer(named)
        refusal = optimizer_refusal(traits, name, type(optimizer).__name__)
        if refusal:
            raise BackendError(refusal)
        names = {id(parameter): name for name, parameter in named}
        strangers = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise BackendError(
                f"the optimizer holds {strangers} parameters that were not handed to make_optimizer; build it inside "
                "make_optimizer, from the parameters it is given: earlier ones may no longer be trained"
            )
        groups[:] = [tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups]
        return optimizer

    return build
