"""The normalization policy: applied to a bare model, before anything wraps it, and reported layer by layer."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from shardkit.errors import NormalizationError
from shardkit.normalization.auto import recommend
from shardkit.normalization.batch_norm import BatchNorm
from shardkit.normalization.convert import convert, describe, is_already, refusal
from shardkit.normalization.report import Applied, Row
from shardkit.recipe.schema import Normalization, NormalizationRule, Policy
from shardkit.world import World

log = logging.getLogger(__name__)

_INDEPENDENT = re.compile(r"(Group|Layer|Instance|RMS)_?Norm", re.IGNORECASE)
# By name: classes that may not be installed, or that cost half a second to import.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A norm layer of the model, all the names it has, and why it cannot be converted (None: it can)."""

    names: tuple[str, ...]
    layer: nn.Module
    unfit: str | None


def apply_policy(
    model: nn.Module,
    settings: Normalization,
    *,
    world: World,
    micro_batch_size: int = 1,
    accumulation: int = 1,
    optimizer_built: bool = False,
) -> Applied:
    """Make the norms of `model` what the policy says, in place; a collective when a layer needs the other ranks.

    Parameters, buffers and their names stay the same objects and names; a substitution (group, layer, instance) drops
    the running statistics. Applied a second time it changes nothing.

    Args:
        model: bare: nothing has wrapped it, and no optimizer has its parameters.
        settings: the recipe's section.
        world: the ranks that share statistics.
        micro_batch_size: items a forward of one rank sees; told to auto.
        accumulation: forwards of one rank in a logical batch; told to auto.
        optimizer_built: an optimizer has the model's parameters already.

    Raises:
        NormalizationError: a layer would lose something, a rule matches no layer, or the model is wrapped; lists all.
    """
    found = _survey(model)
    policy: Policy
    if settings.policy != "auto":
        policy, explanation = settings.policy, ""
    else:
        policy, explanation = recommend(
            model,
            world_size=world.size,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            pretrained=settings.pretrained,
            spatial_size=None,
        )
    chosen: list[Policy] = [_choose(item, policy, settings.rules) for item in found]
    problems = _idle_rules(found, settings.rules) + _refusals(found, chosen)
    if problems:
        raise NormalizationError("\n".join(problems))
    if _changes(found, chosen, settings):
        _refuse_wrapped(model, optimizer_built)
    rows = tuple(_apply(item, each, settings) for item, each in zip(found, chosen, strict=True))
    layers = tuple(module for module in model.modules() if isinstance(module, BatchNorm))
    _connect(layers, world)
    return Applied(policy=policy, rows=rows, layers=layers, explanation=explanation)


def _survey(model: nn.Module) -> list[_Found]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    unfit = {module: _unfit(module) for module in names}
    return [
        _Found(names=tuple(places), layer=module, unfit=unfit[module])
        for module, places in names.items()
        if unfit[module] is not None or isinstance(module, _BatchNorm)
    ]


def _unfit(module: nn.Module) -> str | None:
    """Why a norm layer is not one to convert; None for those that are, and for what is no norm."""
    if isinstance(module, torch.jit.ScriptModule):
        norm = "Norm" in getattr(module, "original_name", "")
        return "not convertible: scripted; convert before torch.jit.script" if norm else None
    if isinstance(module, _LazyNormBase):
        return "not convertible: lazy; run one forward before"
    if isinstance(module, _BatchNorm):
        return None
    if _INDEPENDENT.search(type(module).__name__):
        return "left as it is: independent of the batch"
    if module._buffers.keys() >= {"running_mean", "running_var"}:
        return "not convertible: keeps running statistics, but is no torch BatchNorm"
    return None


def _matches(item: _Found, pattern: str) -> bool:
    classes = (type(item.layer).__name__, getattr(item.layer, "converted_from", ""))
    return any(fnmatchcase(name, pattern) for name in (*item.names, *classes))


def _choose(item: _Found, policy: Policy, rules: list[NormalizationRule]) -> Policy:
    for rule in rules:
        if _matches(item, rule.match):
            return rule.policy
    return policy


def _idle_rules(found: list[_Found], rules: list[NormalizationRule]) -> list[str]:
    names = ", ".join([name for item in found for name in item.names][:8]) or "there is none"
    classes = ", ".join(sorted({type(item.layer).__name__ for item in found})[:8])
    expected = f"a glob on its full name ({names}) or class name ({classes})" if found else "no rule: there is none"
    return [
        f"normalization.rules.{index}.match: {rule.match!r} matches no norm layer; expected {expected}"
        for index, rule in enumerate(rules)
        if not any(_matches(item, rule.match) for item in found)
    ]


def _refusals(found: list[_Found], chosen: list[Policy]) -> list[str]:
    problems = []
    for item, policy in zip(found, chosen, strict=True):
        reason = refusal(cast(_BatchNorm, item.layer), policy) if item.unfit is None else None
        if reason:
            name = item.names[0]
            problems.append(
                f"normalization: policy {policy} cannot have layer {name or '(the model)'!r} "
                f"({type(item.layer).__name__}): it {reason}; leave it as it is with the rule "
                f"{{match: {name or type(item.layer).__name__}, policy: keep}}"
            )
    return problems


def _changes(found: list[_Found], chosen: list[Policy], settings: Normalization) -> bool:
    return any(
        item.unfit is None and not is_already(cast(_BatchNorm, item.layer), policy, settings)
        for item, policy in zip(found, chosen, strict=True)
    )


def _refuse_wrapped(model: nn.Module, optimizer_built: bool) -> None:
    """The policy comes first: wrappers look at buffers and classes when they wrap, and not again."""
    first = "apply the normalization policy to the bare model, before it is wrapped and before its optimizer is built"
    if optimizer_built:
        raise NormalizationError(f"normalization: the optimizer was built already; {first}")
    for name, module in model.named_modules():
        wrapper = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper:
            raise NormalizationError(f"normalization: {name or 'the model'!r} is wrapped already ({wrapper}); {first}")
    for name, parameter in model.named_parameters():
        # The second is how parameters are marked whose values other ranks hold.
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "ds_id"):
            raise NormalizationError(f"normalization: parameter {name!r} is sharded already; {first}")


def _apply(item: _Found, policy: Policy, settings: Normalization) -> Row:
    old = describe(item.layer)
    layer = cast(_BatchNorm, item.layer)
    if item.unfit is not None:
        why = item.unfit
        if why.startswith("not convertible") and policy != "keep":
            log.warning("normalization: %s (%s) is %s", item.names[0] or "the model", old, why)
    elif policy == "keep":
        why = "kept as it is"
    elif is_already(layer, policy, settings):
        why = "was so before: nothing changed"
    else:
        why = convert(layer, policy, settings)
    return Row(names=item.names, old=old, new=describe(item.layer), why=why)


def _connect(layers: tuple[BatchNorm, ...], world: World) -> None:
    """Tell the layers their ranks. One process group of their own: its collectives never mix with the backend's."""
    group = next((layer.group for layer in layers if layer.group is not None), None)
    if group is None and world.size > 1 and any(layer.over_ranks for layer in layers):
        group = cast(dist.ProcessGroup, dist.new_group(timeout=world.timeout))
    for layer in layers:
        layer.world, layer.group = world, group
