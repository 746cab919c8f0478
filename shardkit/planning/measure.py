"""`shardkit plan --measure`: run some steps of each choice that this machine can run, and look at what they needed."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.jobs import launched
from shardkit.planning.amount import ranks
from shardkit.planning.device import Device
from shardkit.planning.measurement import Measurement, read
from shardkit.planning.plan import Plan, Row
from shardkit.planning.reason import named
from shardkit.recipe.schema import Recipe

COUNTED, TIMED = 4, 6
# Steps of a run whose memory is counted, and of one that is timed: on a CPU counting slows a run down.
FEWEST_CPUS = 2
# So many ranks are run on any machine.
ALONE = (
    "data.eval=null",
    "evaluation.every=null",
    "checkpoint.every=null",
    "checkpoint.every_minutes=null",
    "checkpoint.keep_best=null",
    "checkpoint.best=auto",
    "checkpoint.resume=never",
    "train.stop_at_step=null",
    "train.max_epochs=null",
    "metrics.every=1",
    "metrics.tensorboard=false",
    "metrics.profile=false",
)
# Nothing but steps.


def measurable(plan: Plan, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Which of the rows this machine can run, and why not the others."""
    most = most_ranks(plan.device.kind)
    found = [row for row in rows if row.choice.world_size <= most and row.fits is not False]
    left_out = [f"{named(row)}: does not fit, and was not run" for row in rows if row.fits is False]
    too_many = sorted({row.choice.world_size for row in rows if row.choice.world_size > most})
    left_out += [f"{ranks(size)}: not run, this machine runs {most} at the most" for size in too_many]
    return found, left_out


def most_ranks(kind: str) -> int:
    """The most ranks of this machine: a device each, or a CPU."""
    if kind == "cuda":
        import torch

        return torch.cuda.device_count()
    return max(FEWEST_CPUS, os.cpu_count() or 1)


def measure(plan: Plan, rows: Sequence[Row], recipe: str, overrides: Sequence[str]) -> Iterator[Measurement]:
    """Run each row, one after the other, and say what it needed; one that fails does not keep the others from it.

    Args:
        plan: what the rows are of.
        rows: what to run.
        recipe: path of the recipe.
        overrides: `key=value`, as the plan was made with.
    """
    with tempfile.TemporaryDirectory(prefix="shardkit-plan-") as folder:
        for number, row in enumerate(rows, 1):
            print(f"shardkit: measuring {named(row)} ({number} of {len(rows)})", file=sys.stderr, flush=True)
            yield _measured(plan, row, recipe, overrides, Path(folder) / str(number))


def _measured(plan: Plan, row: Row, recipe: str, overrides: Sequence[str], folder: Path) -> Measurement:
    settings = [*overrides, *row.overrides, *ALONE, *_size(row, plan.loaded.recipe)]
    # The allocator counts on CUDA, so that one run is enough.
    steps = COUNTED if plan.device.kind == "cpu" else TIMED
    counted, timed = folder / "counted", folder / "timed"
    error = launched(recipe, [*settings, "metrics.memory=true", f"train.max_steps={steps}"], counted)
    if not error and plan.device.kind == "cpu":
        error = launched(recipe, [*settings, "metrics.memory=false", f"train.max_steps={TIMED}"], timed)
    if error:
        return Measurement(row=row, error=error)
    return read(row, counted, timed if timed.exists() else counted)


def _size(row: Row, recipe: Recipe) -> list[str]:
    """The ranks, and the global batch that was planned with."""
    words = [f"launch.nproc_per_node={row.choice.world_size}"]
    total = row.micro_batch_size * row.accumulation * row.choice.world_size
    return words if total == recipe.batch.global_batch_size else [*words, f"batch.global_batch_size={total}"]


def measured_device(plan: Plan, measured: Sequence[Measurement]) -> Device | None:
    """This machine's device as its ranks found it; None where no run ended well.

    What a model reaches of the operations is what the measured steps reached.
    """
    found = [each for each in measured if each.device]
    if not found:
        return None
    most = max(found, key=lambda each: each.row.choice.world_size)
    speeds = most.device
    device = replace(
        plan.device,
        name=f"{plan.device.name}, measured",
        flops={name: float(value) for name, value in speeds["flops"].items()},
        memory_bandwidth=float(speeds["memory_bandwidth"]),
        host_bandwidth=float(speeds["host_bandwidth"]),
        link_bandwidth=float(speeds["link_bandwidth"] or plan.device.link_bandwidth or speeds["memory_bandwidth"]),
        network_bandwidth=plan.device.network_bandwidth or float(speeds["memory_bandwidth"]),
        memory=plan.device.memory,
        measured=True,
    )
    reached = [part for each in found if (part := _efficiency(plan, each, device)) is not None]
    return replace(device, efficiency=round(statistics.median(reached), 4)) if reached else device


def _efficiency(plan: Plan, measured: Measurement, device: Device) -> float | None:
    """Part of the device's operations a second that a measured run reached, beside what it did else."""
    took, precision = measured.row.duration, plan.loaded.recipe.train.precision.partition("-")[0]
    if took is None or not measured.seconds or not device.flops.get(precision):
        return None
    operations = took.compute * plan.device.flops[precision] * plan.device.efficiency
    beside = took.seconds - took.compute
    # At least a tenth of a step computes.
    computing = max(measured.seconds - beside, measured.seconds / 10)
    return min(1.0, operations / computing / device.flops[precision])
