"""What a backend cannot honour, known from its traits before any process starts."""

from __future__ import annotations

from shardkit.engines import registry
from shardkit.engines.api import Traits
from shardkit.errors import Problem
from shardkit.losses import adapt
from shardkit.recipe.build import build, check_options, make_options
from shardkit.recipe.load import Loaded
from shardkit.recipe.schema import Normalization


def check_backend(loaded: Loaded, device: str, world_size: int) -> list[Problem]:
    """The problems of a recipe with its backend on `world_size` processes that each have a `device`.

    Raises:
        BackendError: the adapter cannot be imported.
    """
    recipe = loaded.recipe
    adapter = registry.load(recipe.backend.adapter)
    problems = check_options(loaded, adapter.Options)
    if problems:
        return problems
    traits, name = adapter.describe(make_options(recipe.backend, adapter.Options)), recipe.backend.name
    found = refusals(traits, name, device=device, size=world_size, precision=recipe.train.precision)
    optimizer = str(recipe.optimizer.get("_target_", "")).rpartition(".")[2]
    try:
        adapt(build(recipe.loss))
    except Exception as error:  # whatever the loss of the user's choice raises
        found.append(("loss", str(error) or type(error).__name__))
    refused = optimizer_refusal(traits, name, optimizer)
    if refused:
        found.append(("optimizer", refused))
    refused = constant_refusal(traits, name, recipe.normalization)
    if refused:
        found.append(("normalization.exact.memory", refused))
    return [Problem(place=loaded.place(key), key=key, message=message) for key, message in found]


def refusals(traits: Traits, name: str, *, device: str, size: int, precision: str) -> list[tuple[str, str]]:
    """(recipe key, sentence) of what a backend cannot honour."""
    found = []
    if device in traits.refusals:
        found.append(("backend", f"backend {name!r}: {traits.refusals[device]}"))
    elif device not in traits.devices:
        runs_on = ", ".join(sorted(traits.devices))
        found.append(("backend", f"backend {name!r} does not run on {device}; it runs on {runs_on}"))
    if traits.max_world_size is not None and size > traits.max_world_size:
        found.append(
            (
                "launch.nproc_per_node",
                f"backend {name!r} runs {traits.max_world_size} process, not {size}: set launch.nproc_per_node="
                f"{traits.max_world_size}, or choose a backend for several, as ddp",
            )
        )
    if size % traits.world_multiple:
        found.append(
            (
                "launch.nproc_per_node",
                f"backend {name!r} needs a multiple of {traits.world_multiple} processes, not {size}: change "
                "launch.nproc_per_node, or the backend's options",
            )
        )
    if precision not in traits.precisions:
        can = ", ".join(sorted(traits.precisions))
        found.append(("train.precision", f"backend {name!r} does not train in {precision}; it trains in {can}"))
    return found


def optimizer_refusal(traits: Traits, name: str, optimizer: str) -> str | None:
    """The sentence that refuses an optimizer class by its name, or None."""
    if optimizer in traits.refused_optimizers:
        return (
            f"backend {name!r} would train {optimizer} wrongly: it needs whole tensors, and this backend holds "
            "shards; use AdamW or SGD, or a backend that keeps parameters whole, as ddp"
        )
    return None


def constant_refusal(traits: Traits, name: str, section: Normalization) -> str | None:
    """The sentence that refuses exact normalization at constant memory, or None."""
    if section.exact.memory == "constant" and not traits.constant_memory:
        return (
            f"backend {name!r} cannot run a block several times over one micro-batch after the other, which constant "
            "needs; use memory: blocks with offload: true, or a backend that keeps a block's parameters together, as "
            "fsdp2"
        )
    return None
