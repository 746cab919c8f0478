"""The policy to write into the recipe: what the sizes of its batches suggest, checked by measuring under it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.doctor.delta import LayerDelta, compare
from shardkit.doctor.passes import Observed, cycle
from shardkit.doctor.subject import Subject, open_copy
from shardkit.errors import RequestError, WindowError
from shardkit.normalization import recommend
from shardkit.recipe.schema import Exact, Normalization, Policy
from shardkit.recipe.writing import written


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """What to write into the recipe."""

    policy: str
    block: str
    why: str
    remaining: float | None = None
    # The largest severity measured under it; None = not measured.


def advise(
    subject: Subject, policy: str, depends: bool, deltas: Sequence[LayerDelta], large: dict[str, Observed]
) -> Recommended:
    """The policy for a model whose layers were measured under the recipe's `policy` and after a `large` batch.

    Args:
        subject: what is examined.
        policy: the recipe's.
        depends: whether any layer normalises by its batch under it.
        deltas: what was measured; empty where that failed.
        large: the layers after one large batch.
    """
    section = subject.normalization
    if not depends:
        return Recommended(
            policy=policy,
            block=_block(section),
            why="No layer of the model normalises by its batch in training under this policy. Nothing in it depends "
            "on how the batch is cut, so there is nothing to do.",
            remaining=0.0,
        )
    if policy == "exact":
        return Recommended(
            policy=policy,
            block=_block(section),
            why="Every BatchNorm already normalises by the whole logical batch. Neither accumulation nor ranks show in "
            "the result, so there is nothing to change.",
            remaining=_remaining(deltas),
        )
    values = [float(seen.calls[0].count) for seen in large.values()]
    best, why = _recommended(subject, spatial_size=max(int(min(values, default=1.0) / subject.items), 1))
    left = deltas if best == policy else _measured(subject, best, large)
    if best == "deferred" and any(delta.verdict == "badly" for delta in left):
        worst = left[0]
        best, left = "exact", _measured(subject, "exact", large)
        why = (
            f"Under deferred, which the size of a micro-batch would allow, the statistics of {worst.name} are still "
            f"off by {worst.amount}. Exact normalises by the whole logical batch, and leaves nothing of it."
        )
    return Recommended(
        policy=best, block=_block(with_policy(section, best)), why=why, remaining=_remaining(left) if left else None
    )


def _measured(subject: Subject, policy: Policy, large: dict[str, Observed]) -> list[LayerDelta]:
    try:
        engine = open_copy(subject, with_policy(subject.normalization, policy), subject.accumulation)
        return compare(cycle(subject, engine), large)
    except (ValueError, WindowError) as error:
        one_value(error)
        return []
    except RequestError:  # flatness says why
        return []


def _remaining(deltas: Sequence[LayerDelta]) -> float:
    return max((delta.severity for delta in deltas), default=0.0)


def with_policy(section: Normalization, policy: Policy) -> Normalization:
    """The recipe's section with another policy; what has no meaning under it goes, rules stay."""
    policies = {policy, *(rule.policy for rule in section.rules)}
    return dataclasses.replace(
        section,
        policy=policy,
        over_ranks=section.over_ranks and "deferred" in policies,
        exact=section.exact if "exact" in policies else Exact(),
    )


def _block(section: Normalization) -> str:
    """What differs from the defaults, and always the policy."""
    kept = {"policy": section.policy, **_differing(section, Normalization())}
    if "exact" in kept:
        kept["exact"] = _differing(section.exact, Exact())
    return written({"normalization": kept}, {}, "").rstrip()


def _differing(section: Normalization | Exact, default: Normalization | Exact) -> dict[str, Any]:
    defaults = dataclasses.asdict(default)
    return {name: value for name, value in dataclasses.asdict(section).items() if value != defaults[name]}


def settled(subject: Subject) -> Subject:
    """With the policy that auto chooses for the recipe's ranks, which its copies here do not have."""
    if subject.normalization.policy != "auto":
        return subject
    return dataclasses.replace(
        subject, normalization=with_policy(subject.normalization, _recommended(subject, spatial_size=None)[0])
    )


def _recommended(subject: Subject, *, spatial_size: int | None) -> tuple[Policy, str]:
    return recommend(
        subject.model,
        world_size=subject.world_size,
        micro_batch_size=subject.micro_batch_size,
        accumulation=subject.accumulation,
        pretrained=subject.normalization.pretrained,
        spatial_size=spatial_size,
    )


def one_value(error: Exception) -> str:
    """The message of a micro-batch that has no variance; any other error is the model's own."""
    if "value a channel" in str(error) or "value per channel" in str(error):
        return str(error)
    raise error
