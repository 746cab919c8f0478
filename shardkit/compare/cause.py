"""Why two arms probably differ: the settings they do not share, the likeliest first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardkit.compare.results import Arm
from shardkit.compare.settings import EXPLAINED, Setting, differences, facts

DTYPES = {"fp64", "fp32", "bf16", "fp16"}
NOTHING = "no setting differs: non-determinism, or a fault of a backend; `shardkit check` names the first tensor"


def _always(reference: dict[str, str], arm: dict[str, str]) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A cause, and the settings that make it probable."""

    cause: str
    keys: str
    # Expression for the keys of settings that differ.
    applies: Callable[[dict[str, str], dict[str, str]], bool] = _always
    # Given all settings of both.
    certain: bool = True
    # Any model trains otherwise then; False = some models do.


def _has_batch_norm(reference: dict[str, str], arm: dict[str, str]) -> bool:
    """Whether statistics depend on how the batch is cut: not known to be absent, and left to a micro-batch."""
    told = [value for known in (reference, arm) for key, value in known.items() if "norm" in key.lower()]
    shows_batch_norm = any("batchnorm" in value.lower().replace(" ", "") for value in told)
    explained = any(key.startswith("explain: ") and "layers" in key for known in (reference, arm) for key in known)
    by_micro_batch = any(
        known.get("normalization.policy", "keep") in {"keep", "sync", "deferred", "auto"} for known in (reference, arm)
    )
    return by_micro_batch and (shows_batch_norm or not explained)


def _substitutes(reference: dict[str, str], arm: dict[str, str]) -> bool:
    """Whether one of the two puts layers of another kind in the place of BatchNorm."""
    return any(known.get("normalization.policy") in {"group", "layer", "instance"} for known in (reference, arm))


def _drops_out(reference: dict[str, str], arm: dict[str, str]) -> bool:
    return any(
        _positive(value)
        for known in (reference, arm)
        for key, value in known.items()
        if re.search(r"drop(out|_path)|(^|\.)p?drop(?!_last)", key)
    )


def _positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return text == "true"


# What changes the maths whatever the model, before what changes it for some models only.
RULES = (
    Rule(cause="other initial weights", keys=r"^init_from$|^load\.|^checkpoint\.resume$"),
    Rule(cause="other data", keys=r"^data\.train(\.|$)"),
    Rule(cause="another data order", keys=r"^data\.(shuffle|drop_last|collate)$"),
    Rule(cause="another seed: other initial weights or another data order", keys=r"^seed$"),
    Rule(cause="another model", keys=r"^model\.(?!.*drop)"),
    Rule(cause="another loss", keys=r"^loss(\.|$)"),
    Rule(cause="another global batch size", keys=r"^batch\.global_batch_size$"),
    Rule(
        cause="precision: another compute or reduction dtype",
        keys=r"^train\.precision$|^explain: dtypes\.(storage|compute|gather|reduce|norm_statistics)",
    ),
    Rule(cause="clipping of gradients", keys=r"^train\.max_grad_norm$"),
    Rule(
        cause="the learning-rate schedule",
        keys=r"^scheduler(\.|$)|^optimizer\.lr$|^train\.max_(steps|epochs)$",
    ),
    Rule(cause="weight decay", keys=r"weight_decay"),
    Rule(cause="another optimizer", keys=r"^optimizer\."),
    Rule(cause="parameter groups", keys=r"^parameter_groups"),
    Rule(cause="frozen layers", keys=r"frozen|freeze|requires_grad|explain: .*trainable"),
    Rule(
        cause="other norm layers",
        keys=r"^normalization\.(policy|num_groups)$",
        applies=_substitutes,
        certain=False,
    ),
    Rule(
        cause="BatchNorm statistics by rank and micro-batch",
        keys=r"^normalization\.|^batch\.micro_batch_size$|^world size$|nproc_per_node|explain: .*norm",
        applies=_has_batch_norm,
        certain=False,
    ),
    Rule(cause="another evaluation", keys=r"^data\.eval(\.|$)|^evaluation\.", certain=False),
    Rule(cause="the normalization policy", keys=r"^normalization\.(policy|rules|num_groups)", certain=False),
    Rule(cause="dropout", keys=r"drop(out|_path|_rate|_prob)"),
    Rule(
        cause="dropout: its random numbers depend on the rank and the micro-batch",
        keys=r"^batch\.micro_batch_size$|^world size$|nproc_per_node|^backend",
        applies=_drops_out,
        certain=False,
    ),
)
# Settings that order sums otherwise, and may do no more.
_ORDERS = (
    r"^backend|^world size$|^batch\.micro_batch_size$|nproc_per_node|^activation_checkpointing|^normalization\.exact"
)
# What a curve that differs says of the causes.
_BY_CURVE = {
    "lr": r"schedul|lr|max_(steps|epochs)",
    "items": r"^batch\.|^data\.|world size",
    # Where training is the same: what only evaluations see is other data, or other running statistics.
    "eval_loss": r"^data\.eval|^evaluation|^normalization|^explain: .*norm",
}


def changes_maths(reference: Arm, arm: Arm) -> bool:
    """Whether a setting of the recipe differs that makes any model train otherwise."""
    keys = [each.key for each in differences(reference, arm) if _speaks(each)]
    return any(re.search(rule.keys, key) for rule in RULES if rule.certain for key in keys)


def orders_alike(reference: Arm, arm: Arm) -> bool:
    """Whether both add numbers up in the same order: one backend with its options, as many ranks, the same cut."""
    return not any(re.search(_ORDERS, each.key) for each in differences(reference, arm))


def cause(reference: Arm, arm: Arm, curve: str | None = None) -> str:
    """The probable causes with the settings that speak for them, or that no setting differs.

    Args:
        curve: the one that differs first, where it is known.
    """
    settings = differences(reference, arm)
    if not settings:
        code = _code(reference, arm)
        return f"no setting differs, but other code: {', '.join(code)}" if code else NOTHING
    ranked = probable(settings, facts(reference), facts(arm))
    if curve in _BY_CURVE:
        # The curve names the kind of setting; the sort keeps the order of the others.
        ranked.sort(key=lambda each: not any(re.search(_BY_CURVE[curve], s.key) for s in each[1]))
    if not ranked:
        names = ", ".join(_told(setting) for setting in settings[:3])
        return f"no setting that changes the maths differs ({names}): the backends differ, or non-determinism; " + (
            "`shardkit check` names the first tensor"
        )
    return "; or ".join(f"{name} ({', '.join(_told(setting) for setting in why[:3])})" for name, why in ranked[:3])


def _code(reference: Arm, arm: Arm) -> list[str]:
    """Versions that are not the same: the commit that was run, and libraries."""
    ours, theirs = (
        next(
            (
                {"git_commit": run.environment.get("git_commit"), **(run.environment.get("packages") or {})}
                for run in each.runs
            ),
            {},
        )
        for each in (reference, arm)
    )
    return [f"{key} {ours[key]} -> {theirs[key]}" for key in ours if key in theirs and ours[key] != theirs[key]]


def probable(
    settings: Sequence[Setting], reference: dict[str, str], arm: dict[str, str]
) -> list[tuple[str, list[Setting]]]:
    """(cause, the settings that speak for it), the likeliest first; a setting speaks for one cause only."""
    found: list[tuple[str, list[Setting]]] = []
    left = [setting for setting in settings if _speaks(setting)]
    for rule in RULES:
        if not rule.applies(reference, arm):
            continue
        why = [setting for setting in left if re.search(rule.keys, setting.key)]
        # What a setting comes to is told where no setting is.
        told = [setting for setting in why if not setting.key.startswith(EXPLAINED)] or why
        if why:
            found.append((rule.cause, told))
            left = [setting for setting in left if setting not in why]
    return found


def _speaks(setting: Setting) -> bool:
    """Whether it can be a cause: one process reduces in no dtype, which is not another dtype."""
    return not setting.key.startswith(f"{EXPLAINED}dtypes.") or {setting.reference, setting.arm} <= DTYPES


def _told(setting: Setting) -> str:
    return f"{setting.key}: {setting.reference} -> {setting.arm}"
