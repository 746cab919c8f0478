"""What becomes of one norm layer under a policy: a refusal, or another class for the same object.

Layers change their class in place, as torch's own `fully_shard` does. So a layer stays one object at all its places,
with its parameters, buffers, hooks, training flag, device and dtype.
"""

from __future__ import annotations

from typing import get_args

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from shardkit.normalization.batch_norm import BatchNorm
from shardkit.normalization.subclass import has_own_forward, kept
from shardkit.normalization.subclass import refusal as subclass_refusal
from shardkit.normalization.substitute import Substitution, substitute
from shardkit.recipe.schema import Normalization, Policy

SUBSTITUTIONS: tuple[str, ...] = get_args(Substitution)
# Overridden by a subclass, these do not change what a layer does.
_HARMLESS = {"__init__", "__repr__", "extra_repr", "_check_input_dim", "reset_parameters", "reset_running_stats"}
_WHY = {
    "sync": "statistics over all ranks of a micro-step",
    "deferred": "running statistics move once a logical batch",
    "exact": "statistics of the whole logical batch",
    "frozen": "evaluation statistics, also in training",
}


def describe(layer: nn.Module) -> str:
    """Its class, and what distinguishes it from others of that class."""
    name = type(layer).__name__
    if isinstance(layer, BatchNorm):
        return f"{name}({layer.mode})"
    return f"{name}({layer.num_groups})" if isinstance(layer, nn.GroupNorm) else name


def is_already(layer: _BatchNorm, policy: Policy, settings: Normalization) -> bool:
    """Whether `policy` would change nothing."""
    if policy == "keep":
        return True
    if not isinstance(layer, BatchNorm) or layer.mode != policy:
        return False
    return policy != "deferred" or layer.over_ranks == settings.over_ranks


def refusal(layer: _BatchNorm, policy: Policy) -> str | None:
    """What would be lost, in words that follow the layer's name; None when nothing would."""
    if policy == "keep":
        return None
    if policy == "frozen" and (layer.running_mean is None or layer.running_var is None):
        return "keeps no running statistics that frozen could normalise by"
    if isinstance(layer, BatchNorm) and policy not in SUBSTITUTIONS:
        return None
    if "forward" in vars(layer):
        return "has had its forward replaced on the object, and ours would not be called"
    if parametrize.is_parametrized(layer):
        return "is parametrized (torch.nn.utils.parametrize), which is bound to its class"
    group = getattr(layer, "process_group", None)
    if group is not None and not (dist.is_initialized() and group is dist.group.WORLD):
        return "synchronises over a process group of its own"
    return _substitution_refusal(layer) if policy in SUBSTITUTIONS else subclass_refusal(type(layer))


def _substitution_refusal(layer: _BatchNorm) -> str | None:
    kind = type(layer)
    if has_own_forward(kind):
        return "has a forward of its own, which a substitute would not have"
    torchs = ("torch", "shardkit")
    own = {name for base in kind.__mro__ if base.__module__.partition(".")[0] not in torchs for name in vars(base)}
    own = {name for name in own if callable(getattr(kind, name, None)) and not hasattr(object, name)} - _HARMLESS
    if own:
        return f"has behaviour of its own ({', '.join(sorted(own))}), which a substitute would not have"
    strange = set(layer._parameters) | set(layer._buffers) | set(layer._modules)
    strange -= {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    if strange or "weight" not in layer._parameters:
        names = ", ".join(sorted(strange)) or "a weight that is no parameter"
        return f"has more in it than a BatchNorm ({names}), which a substitute would not have"
    if layer.num_features == 1 and not isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d):
        return "has one channel: a substitute would make zeros of (N, 1)"
    return None


def convert(layer: _BatchNorm, policy: Policy, settings: Normalization) -> str:
    """Make `layer` what `policy` says, in place; why, in words. `refusal` said it can be."""
    if policy in ("group", "layer", "instance"):
        vars(layer)["converted_from"] = _origin(layer)
        substitute(layer, policy, settings.num_groups)
        return "independent of the batch; needs retraining"
    assert policy != "keep"
    if not isinstance(layer, BatchNorm):
        vars(layer)["converted_from"] = _origin(layer)
        layer.__class__ = kept(type(layer))
        layer.__dict__.pop("process_group", None)
    assert isinstance(layer, BatchNorm)
    evaluates = not layer.training and policy != "frozen"
    layer.set_mode(policy, over_ranks=settings.over_ranks)
    why = _WHY[policy]
    if policy == "deferred" and layer.over_ranks:
        why += "; normalises over ranks"
    if evaluates:
        why += "; in evaluation until train()"
    tracked = layer.num_batches_tracked
    if policy == "frozen" and tracked is not None and not tracked.is_meta and int(tracked) == 0:
        why += "; has counted no batch"
    return why


def _origin(layer: nn.Module) -> str:
    return getattr(layer, "converted_from", type(layer).__name__)
