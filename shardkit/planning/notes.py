"""What a reader of a plan has to know beside its numbers: sentences, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.planning.amount import listed, ranks, size
from shardkit.planning.plan import Plan, Row

EXACT = (
    "Exact, from the shapes of the model's and the optimizer's tensors: parameters, masters, optimizer, gradients, "
    "buffers. An estimate, from one traced micro-step: activations, communication buffers, peak. The peak is less "
    "than the sum where not all are held at one time. Not seen: workspaces inside operators, fragmentation, kernels' "
    "code; the margin is for those. Micro: the largest micro-batch that fits, of those that divide what a rank sees "
    "in a step; moved: bytes of the full tensors in a step's collectives."
)
SPEED = (
    "Step times are a roofline: operations, memory and links at the device's own rates, so good to a factor of two at "
    "best; choices compare better than that."
)


def notes(plan: Plan, rows: list[Row], machine: str = "", correction: str = "") -> list[str]:
    """A sentence or two each.

    Args:
        plan: the plan.
        rows: those that are shown.
        machine: where the device's numbers are from.
        correction: which measurements correct the peaks.
    """
    found = [EXACT, _device(plan, machine)]
    if any(row.duration for row in rows):
        found.append(SPEED)
    if correction:
        found.append(correction)
    found += [*_settings(rows), *_loadings(rows), *_hosts(plan, rows), *_batches(plan.rows)]
    return [*found, *_evaluations(plan)]


def silent(plan: Plan) -> list[str]:
    """What is refused, and what is not known: a sentence each, with the choices it is said of."""
    said: dict[str, dict[str, list[int]]] = {}
    for row in plan.rows:
        sentence = row.refused or row.unknown
        # Where a backend is refused, so it is with its blocks recomputed.
        if sentence:
            sizes = said.setdefault(sentence, {}).setdefault(row.choice.backend, [])
            if row.choice.world_size not in sizes:
                sizes.append(row.choice.world_size)
    return [f"{_who(names)}: {sentence}" for sentence, names in said.items()]


def _who(names: dict[str, list[int]]) -> str:
    """ "zero1, zero2 (2 and 4 ranks)"."""
    by_sizes: dict[tuple[int, ...], list[str]] = {}
    for name, sizes in names.items():
        by_sizes.setdefault(tuple(sorted(sizes)), []).append(name)
    return "; ".join(
        f"{', '.join(who)} ({listed([str(n) for n in sizes[:-1]] + [ranks(sizes[-1])])})"
        for sizes, who in by_sizes.items()
    )


def _device(plan: Plan, machine: str) -> str:
    device = plan.device
    what = machine or f"{device.name}, {size(device.memory)}"
    return (
        f"Device: {what}. A choice needs its peak, {device.margin:.0%} of margin on it, and {size(device.reserved)} "
        "that no tensor gets."
    )


def _evaluations(plan: Plan) -> Iterator[str]:
    recipe = plan.loaded.recipe
    items, trained = recipe.evaluation.micro_batch_size, recipe.batch.micro_batch_size
    if recipe.data.eval is not None and items is not None and items > trained:
        yield (
            f"Not planned: evaluations, whose forwards see {items} items of a rank, and those of training {trained}. "
            "They keep nothing for a backward, but a layer's own tensors grow with the items."
        )


def _settings(rows: list[Row]) -> Iterator[str]:
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.footprint and row.footprint.settings:
            words = ", ".join(f"{key}={value}" for key, value in row.footprint.settings.items())
            names = said.setdefault(words, [])
            if row.choice.backend not in names:
                names.append(row.choice.backend)
    for words, names in said.items():
        yield f"Buffers chosen from the model, {listed(names)}: {words}."


def _loadings(rows: list[Row]) -> Iterator[str]:
    said: dict[int, list[str]] = {}
    for row in rows:
        if row.footprint and row.peak is not None and row.footprint.loading > row.peak:
            said.setdefault(row.footprint.loading, []).append(f"{row.choice.name} on {ranks(row.choice.world_size)}")
    for amount, names in said.items():
        yield f"More than a step needs is needed to put the model in place, {size(amount)}: {listed(names)}."


def _hosts(plan: Plan, rows: list[Row]) -> Iterator[str]:
    found = [(row, row.footprint) for row in rows if row.footprint is not None]
    if plan.device.kind == "cpu":
        names = list(dict.fromkeys(row.choice.backend for row, footprint in found if footprint.host))
        if names:
            yield f"What {listed(names)} keep in host memory is in the same memory on a CPU: in the peak, in no column."
        return
    if found:
        built = size(max(footprint.host_loading for _, footprint in found))
        yield f"Each rank builds the whole model in host memory first: {built}, beside the process itself."
    said: dict[str, list[str]] = {}
    for row, footprint in found:
        if footprint.host:
            said.setdefault(size(footprint.host), []).append(f"{row.choice.name} on {ranks(row.choice.world_size)}")
    if said:
        words = [f"{listed(names)} {amount}" for amount, names in said.items()]
        yield f"Host memory that a rank's offloaded states take: {'; '.join(words)}."


def _batches(rows: tuple[Row, ...]) -> Iterator[str]:
    said = {row.choice.world_size: row.note for row in rows if row.note}
    for count, note in said.items():
        yield f"{ranks(count)}: {note}."
