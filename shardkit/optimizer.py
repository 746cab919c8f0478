"""The optimizer of a recipe: its parameter groups, formed from the names of what will be trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkit.errors import RequestError
from shardkit.recipe.build import build
from shardkit.recipe.schema import ParameterGroup

if TYPE_CHECKING:
    import torch

    from shardkit.engines.api import MakeOptimizer, NamedParameters


def maker(target: dict[str, Any], groups: Sequence[ParameterGroup]) -> MakeOptimizer:
    """What the engine calls, once, with the parameters that will be trained."""

    def make(named: NamedParameters) -> torch.optim.Optimizer:
        return build(target, grouped(named, groups))

    return make


def grouped(named: NamedParameters, groups: Sequence[ParameterGroup]) -> list[Any]:
    """The parameters as torch optimizers take them: the unmatched first, with no options, then a dict a group.

    Raises:
        RequestError: a group gets no parameter.
    """
    if not groups:
        return [parameter for _, parameter in named]
    members: list[list[Any]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in named:
        first = next((i for i, group in enumerate(groups) if fnmatch.fnmatchcase(name, group.match)), len(groups))
        members[first].append(parameter)
    _refuse_empty([name for name, _ in named], groups, members)
    options = [dict(group.options) for group in groups]
    matched = [{"params": own, **more} for own, more in zip(members, options, strict=False)]
    return [{"params": members[-1]}, *matched] if members[-1] else matched


def _refuse_empty(names: list[str], groups: Sequence[ParameterGroup], members: list[list[Any]]) -> None:
    for index, group in enumerate(groups):
        if members[index]:
            continue
        matching = fnmatch.filter(names, group.match)
        shown = ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")
        why = (
            f"all {len(matching)} parameters it matches belong to an earlier group; put it before that one"
            if matching
            else f"it matches no parameter that is trained; there are {shown}"
        )
        raise RequestError(f"parameter_groups[{index}].match: {group.match!r}: {why}")
