"""The second pass over a recipe: everything that can be known before a rank starts, with torch at hand."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit.engines import registry
from shardkit.errors import BackendError, Problem, RecipeError, RequestError
from shardkit.launch.sources import check_sources

if TYPE_CHECKING:
    from shardkit.recipe.load import Loaded


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a recipe comes to on this machine."""

    world_size: int
    device: str
    # "cpu" or "cuda".
    accumulation: int
    # Micro-steps in a full window.


def check(loaded: Loaded, *, world_size: int | None = None) -> Preflight:
    """What will run, after every check that needs no rank; an outer launcher has settled the `world_size`.

    Raises:
        RecipeError: the recipe cannot run here; all problems at once.
    """
    recipe = loaded.recipe
    problems: list[Problem] = []
    device = _device(loaded, problems)
    size = world_size or processes(loaded, device)
    if world_size is None:
        problems += _too_many(loaded, device, size)
    problems += [
        Problem(place=loaded.place(key), key=key, message=message) for key, message in recipe.check_world(size)
    ]
    problems += _problems(loaded, device, size)
    if problems:
        raise RecipeError(sorted(dict.fromkeys(problems), key=_order))
    return Preflight(world_size=size, device=device, accumulation=recipe.gradient_accumulation_steps(size))


def _order(problem: Problem) -> tuple[list[str | int], str]:
    """By place, with lines and columns in the order of numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", problem.place)], problem.key


def _device(loaded: Loaded, problems: list[Problem]) -> str:
    from shardkit.world import resolve_device

    try:
        return resolve_device(loaded.recipe.launch.device, 0).type
    except RequestError as error:
        message = str(error).removeprefix("launch.device: ")
        problems.append(Problem(place=loaded.place("launch.device"), key="launch.device", message=message))
        return "cpu"


def processes(loaded: Loaded, device: str) -> int:
    """Processes on this machine when nobody above has decided."""
    asked = loaded.recipe.launch.nproc_per_node
    if isinstance(asked, int):
        return asked
    registration = registry.BUILT_IN.get(loaded.recipe.backend.adapter)
    if registration is not None and registration.one_process:
        return 1
    if device == "cuda":
        import torch

        return torch.cuda.device_count()
    return min(2, os.cpu_count() or 1)


def _too_many(loaded: Loaded, device: str, processes: int) -> Iterator[Problem]:
    """Two ranks on one CUDA device do not meet in NCCL."""
    if device != "cuda":
        return
    import torch

    devices = torch.cuda.device_count()
    if processes > devices:
        key = "launch.nproc_per_node"
        message = f"{processes} processes on {devices} CUDA devices; expected one a device, or launch.device=cpu"
        yield Problem(place=loaded.place(key), key=key, message=message)


def _problems(loaded: Loaded, device: str, world_size: int) -> Iterator[Problem]:
    from shardkit.engines.checks import check_backend
    from shardkit.recipe.build import check_targets

    wrong = list(check_targets(loaded))
    yield from wrong
    told = {problem.key.partition(".")[0] for problem in wrong}
    try:
        # What cannot be found cannot be built either.
        yield from (problem for problem in check_backend(loaded, device, world_size) if problem.key not in told)
    except BackendError as error:
        yield Problem(place=loaded.place("backend"), key="backend", message=str(error))
    yield from _own_rules(loaded)
    yield from check_sources(loaded)


def _own_rules(loaded: Loaded) -> Iterator[Problem]:
    """What the loop and the run folder cannot do."""
    recipe = loaded.recipe
    if recipe.scheduler is not None and _wants_a_metric(recipe.scheduler):
        yield Problem(
            place=loaded.place("scheduler"),
            key="scheduler",
            message=f"{recipe.scheduler['_target_']!r} steps on a metric, and a scheduler here steps once an "
            "optimizer step without one; use a schedule of the step count, as CosineAnnealingLR",
        )
    if recipe.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield Problem(
            place=loaded.place("metrics.tensorboard"),
            key="metrics.tensorboard",
            message="tensorboard is not installed. pip install 'shardkit[tensorboard]'",
        )


def _wants_a_metric(target: dict[str, Any]) -> bool:
    """Whether the scheduler's `step` has an argument it cannot do without."""
    module, _, name = str(target.get("_target_", "")).rpartition(".")
    try:
        step = getattr(importlib.import_module(module), name).step
        parameters = list(inspect.signature(step).parameters.values())[1:]
    except (ImportError, AttributeError, TypeError, ValueError):
        return False  # no such class, or no class: check_targets says so
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
