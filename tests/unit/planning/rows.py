"""Plans made by hand, of rows whose numbers are round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardkit.communication import Volume
from shardkit.engines import registry
from shardkit.engines.footprint import Footprint
from shardkit.planning import ladder
from shardkit.planning.device import Device
from shardkit.planning.duration import Duration
from shardkit.planning.ladder import Choice
from shardkit.planning.plan import Plan, Row, needed
from shardkit.recipe.load import load

GIB = 2**30
OWN = "first"
# The recipe's backend.
DEVICE = Device(
    name="made",
    memory=10 * GIB,
    margin=0.0,
    memory_bandwidth=1e12,
    link_bandwidth=1e11,
    network_bandwidth=1e10,
    host_bandwidth=1e10,
)


def row(
    backend: str,
    peak: float | None,
    *,
    world_size: int = 2,
    rung: int = 1,
    seconds: float = 1.0,
    options: dict[str, Any] | None = None,
    recompute: bool = False,
    largest: int | None = 4,
    device: Device = DEVICE,
    moved: int = GIB,
    **more: Any,
) -> Row:
    """A row that peaks at so many GiB; half of it activations."""
    choice = Choice(
        backend=backend,
        world_size=world_size,
        options=options or {},
        activation_checkpointing="blocks" if recompute else None,
    )
    overrides = choice.words([] if backend == OWN else [f"backend={backend}"])
    if peak is None:
        return Row(
            choice=choice, overrides=overrides, rung=rung, unknown="nothing is known", memory=device.memory, **more
        )
    total = int(peak * GIB)
    footprint = Footprint(
        parameters=total // 8,
        gradients=total // 8,
        masters=0,
        optimizer=total // 4,
        buffers=0,
        peak=total,
        at_peak={"parameters": total // 8, "gradients": total // 8, "optimizer": total // 4, "activations": total // 2},
        when="backward of blocks.3",
    )
    needs = needed(device, footprint.peak)
    return Row(
        choice=choice,
        overrides=overrides,
        rung=ladder.LAST if recompute else rung,
        footprint=replace(footprint, **more.pop("footprint", {})),
        memory=device.memory,
        needs=needs,
        fits=needs <= device.memory,
        largest_micro_batch_size=largest,
        communication={"all_reduce": Volume(1, moved)},
        duration=Duration(compute=seconds, communication=0.0, optimizer=0.0, host=0.0, seconds=seconds),
        micro_batch_size=more.pop("micro_batch_size", 4),
        accumulation=more.pop("accumulation", 2),
        **more,
    )


def plan_of(*rows: Row, loaded: Any = None, device: Device = DEVICE) -> Plan:
    """The plan that has these rows."""
    ordered = sorted(rows, key=lambda each: each.cost)
    fitting = [each for each in ordered if each.fits]
    return Plan(
        loaded=loaded or load("digits-resnet", ["evaluation.micro_batch_size=null"], options_of=registry.options_of),
        device=device,
        parameters=1_000_000,
        built_on="meta",
        rows=tuple(ordered),
        recommended=fitting[0] if fitting else None,
        runner_up=fitting[1] if len(fitting) > 1 else None,
    )
