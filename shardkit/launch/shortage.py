"""What the plan says of a run whose memory ran out: what that rank needs, and the nearest setting that fits."""

from __future__ import annotations

from dataclasses import replace

from shardkit.engines import registry
from shardkit.launch.failure import Failure
from shardkit.recipe.load import load
from shardkit.run_folder import RunFolder


def told(folder: RunFolder, cause: Failure, world_size: int) -> str:
    """The lines for a terminal; planning takes seconds, so the failure itself is told before.

    Raises:
        Exception: whatever keeps the recipe from being planned.
    """
    from shardkit.planning.amount import size
    from shardkit.planning.ladder import backends
    from shardkit.planning.machine import machine
    from shardkit.planning.nearest import nearest
    from shardkit.planning.plan import Wanted, plan
    from shardkit.world import resolve_device

    loaded = load(folder.recipe, [], options_of=registry.options_of)
    own = loaded.recipe.backend.name
    here = machine(resolve_device(loaded.recipe.launch.device, 0).type)
    memory = cause.memory or (here.device.memory // world_size if here.shared_memory else here.device.memory)
    names = tuple(dict.fromkeys((own, *backends())))
    found = plan(loaded, Wanted(device=replace(here.device, memory=memory), world_sizes=(world_size,), backends=names))
    row = next(
        row
        for row in found.rows
        if row.choice.backend == own and not row.choice.options and row.choice.activation_checkpointing is None
    )
    if row.footprint is None or row.needs is None or row.unknown:
        why = row.refused or row.unknown
        return f"shardkit: the plan cannot say what rank {cause.rank} needs: {why}"
    parts = ", ".join(f"{part} {size(count)}" for part, count in sorted(row.footprint.at_peak.items(), key=_by_size))
    what = f"{own} on {world_size} rank{'s' * (world_size > 1)} with micro-batches of {row.micro_batch_size}"
    lines = [
        f"shardkit: by the plan rank {cause.rank} needs {size(row.needs)} of {size(memory)} ({what}): "
        f"{size(row.footprint.peak)} at the {row.footprint.when} ({parts}), the rest kept free"
    ]
    if row.fits:
        lines.append(
            "shardkit: so it should fit: another process may hold memory, or the model makes more than was traced; "
            "`shardkit plan --measure` measures it"
        )
    change = nearest(found, row)
    fits = "needs less" if row.fits else "fits"
    lines.append(f"shardkit: it {fits} {change.says}" if change else "shardkit: no setting that was looked at fits")
    return "\n".join(lines)


def _by_size(part: tuple[str, int]) -> int:
    return -part[1]
