"""The verdict: what was measured, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.doctor.delta import LayerDelta
from shardkit.doctor.flatness import Flatness
from shardkit.doctor.passes import training_norms
from shardkit.doctor.subject import Subject


def in_words(
    subject: Subject,
    policy: str,
    deltas: Sequence[LayerDelta],
    memory: Sequence[Flatness],
    failure: str | None,
    recommended: str,
) -> str:
    """What happens to the running statistics and to memory under the recipe's policy and the recommended one."""
    if failure:
        first = f"A forward of the recipe's micro-batches fails under {policy}: {failure}."
    elif not deltas:
        first = _without_norms(subject, policy)
    else:
        first = _drift(subject, policy, deltas, _cut(subject))
    shown = [flat for flat in memory if flat.policy in (policy, recommended)]
    sentences = [first, *map(_flatness, shown)]
    settings = subject.normalization.exact
    if settings.memory == "blocks" and settings.offload is not True and _grows_exactly(shown):
        sentences.append("Where that does not fit: normalization.exact.offload=true, or .memory=constant.")
    return " ".join(sentences)


def _grows_exactly(memory: Sequence[Flatness]) -> bool:
    return any(flat.policy == "exact" and flat.verdict == "grows" for flat in memory)


def _flatness(flat: Flatness) -> str:
    if flat.growth is None:
        return f"Memory could not be measured under {flat.policy} at every accumulation: {flat.failure}."
    word = "stays flat" if flat.verdict == "flat" else "grows"
    return f"Memory {word} under {flat.policy}: {flat.growth:.2f} times from accumulation 2 to 8."


def _without_norms(subject: Subject, policy: str) -> str:
    if not training_norms(subject.model):
        return "No BatchNorm in this model normalises by its batch: accumulation and ranks change nothing."
    return f"Policy {policy} leaves no BatchNorm that normalises by its batch: accumulation and ranks change nothing."


def _drift(subject: Subject, policy: str, deltas: Sequence[LayerDelta], cut: str) -> str:
    off = [delta for delta in deltas if delta.verdict != "ok"]
    if not off:
        return (
            f"No layer drifts under {policy}: after {cut}, all {len(deltas)} have the running statistics of one batch "
            f"of {subject.items} items, to {deltas[0].amount}."
        )
    badly = sum(delta.verdict == "badly" for delta in off)
    names = ", ".join(delta.name for delta in off[:3])
    more = f" and {len(off) - 3} more" if len(off) > 3 else ""
    sentence = (
        f"{len(off)} of {len(deltas)} layers drift under {policy}, {badly} of them badly ({names}{more}): after {cut}, "
        f"their running statistics are not those of one batch of {subject.items} items, off by {off[0].amount} "
        f"in the worst layer."
    )
    worst = off[0]
    if worst.updates > 1 and worst.momentum is not None:
        pace = 1 - (1 - worst.momentum) ** worst.updates
        sentence += (
            f" They move {worst.updates} times an optimizer step: momentum {worst.momentum:g} works as {pace:.2g}."
        )
    return sentence


def _cut(subject: Subject) -> str:
    ranks = f" on each of {subject.world_size} ranks" if subject.world_size > 1 else ""
    count = subject.accumulation
    return f"{count} micro-batch{'es' if count > 1 else ''} of {subject.micro_batch_size}{ranks}"
