"""Sharding units: the blocks of a model whose parameters are gathered together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from shardkit.errors import BackendError

log = logging.getLogger(__name__)


def find_units(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """(name, module) of the blocks to shard as one unit each, in the order of the model.

    `blocks` are globs on module names or class names. When empty: the children of the ModuleList or Sequential that
    holds most parameters, so that a model no one annotated is not gathered whole.

    Raises:
        BackendError: a glob matches no module; says which names and classes there are.
    """
    if not blocks:
        return _largest_stack(model)
    modules = [(name, module) for name, module in model.named_modules() if name]
    units: dict[str, nn.Module] = {}
    for pattern in blocks:
        matched = {n: m for n, m in modules if fnmatchcase(n, pattern) or fnmatchcase(type(m).__name__, pattern)}
        matched = {n: m for n, m in matched.items() if any(True for _ in m.parameters())}
        if not matched:
            names = sorted({name.rpartition(".")[0] + ".*" if "." in name else name for name, _ in modules})
            classes = sorted({type(module).__name__ for _, module in modules})
            raise BackendError(
                f"blocks: {pattern!r} matches no module with parameters; expected a glob on a module name "
                f"({', '.join(names[:12])}) or on a class name ({', '.join(classes[:12])})"
            )
        units.update(_outermost(matched))
    order = {name: index for index, (name, _) in enumerate(modules)}
    found = _with_forward(sorted(units.items(), key=lambda unit: order[unit[0]]))
    tied = _tied_outside(model, found)
    if tied:
        name, parameter = next(iter(tied.items()))
        raise BackendError(
            f"blocks: {name!r} shares the parameter {parameter!r} with a module outside of it, and a shared parameter "
            "cannot lie in two sharding units; list a module that holds both places, or leave this block out"
        )
    return found


def _outermost(matched: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """`blocks.*` also matches `blocks.0.norm`: only the outermost of each chain is meant."""
    return {
        name: module
        for name, module in matched.items()
        if not any(name.startswith(other + ".") for other in matched if other != name)
    }


def _largest_stack(model: nn.Module) -> list[tuple[str, nn.Module]]:
    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and module is not model
    ]
    if not stacks:
        return []
    name, stack = max(stacks, key=lambda item: size(item[1]))
    found = _with_forward([(f"{name}.{child}", module) for child, module in stack.named_children()])
    # What shares a parameter with the rest of the model stays in the root.
    tied = _tied_outside(model, found)
    return [(name, module) for name, module in found if size(module) and name not in tied]


def _with_forward(units: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """A container that is never called itself (ModuleList, ModuleDict) stands for what it holds."""
    found = []
    for name, module in units:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            found += _with_forward([(f"{name}.{child}", inner) for child, inner in module.named_children()])
        else:
            found.append((name, module))
    return found


def _tied_outside(model: nn.Module, units: list[tuple[str, nn.Module]]) -> dict[str, str]:
    """Unit -> a parameter of it that also lies in another unit, or in none."""
    places: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((unit for unit, _ in units if name.startswith(unit + ".")), "")
        places.setdefault(id(parameter), set()).add(unit)
    return {
        unit: name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        for unit in places[id(parameter)]
        if unit and name.startswith(unit + ".") and len(places[id(parameter)]) > 1
    }
