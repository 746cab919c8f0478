"""Runs that were never launched, for tests of comparisons: curves with rounding noise, times, profiles."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.compare.results import Arm, Comparison, Run

MIB = 2**20
RECIPE: dict[str, Any] = {
    "name": "planted",
    "seed": 0,
    "model": {"_target_": "models.Net", "depth": 8, "dropout": 0.0},
    "data": {"train": {"_target_": "data.Set"}, "shuffle": True},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.0},
    "scheduler": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 30},
    "batch": {"global_batch_size": 96, "micro_batch_size": 24},
    "train": {"max_steps": 30, "max_grad_norm": 1.0, "precision": "fp32"},
    "normalization": {"policy": "keep"},
    "backend": {"name": "ddp", "adapter": "ddp", "options": {}},
}
BATCH_NORM = {"normalization": {"layers": ["9 x BatchNorm2d: kept as it is"]}}


def make_run(
    *,
    seed: int = 0,
    steps: int = 30,
    rounding: float = 0.0,
    amplification: float = 1.0,
    seconds: float = 0.1,
    spread: float = 0.02,
    status: str = "completed",
    profile: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
) -> Run:
    """A run whose curves are those of all others but for noise of `rounding`, amplified at each step."""
    draws = np.random.default_rng(seed)
    times = seconds * np.exp(spread * draws.standard_normal(steps))
    times[0] *= 5
    train = []
    for index in range(steps):
        off = rounding * amplification**index * draws.standard_normal(2)
        train.append(
            {
                "kind": "train",
                "step": index + 1,
                "loss": (0.2 + 2.1 * 0.9**index) * (1 + off[0]),
                "grad_norm": (0.5 + 0.4 * 0.95**index) * (1 + 10 * off[1]),
                "lr": 0.1 * 0.95**index,
                "items": 96,
                "seconds": float(times[index]),
                "memory_bytes": 400 * MIB,
                "skipped": False,
            }
        )
    return Run(
        folder=Path("runs/planted"),
        status=status,
        train=train,
        profile=profile,
        environment={"world_size": 2, "device_type": "cpu", "packages": {"torch": "2.13.0"}, **(environment or {})},
    )


def make_arm(name: str, runs: Sequence[Run], explanation: dict[str, Any] | None = None, **settings: Any) -> Arm:
    """An arm with the recipe of all, but for `settings`: section__key = value."""
    recipe = copy.deepcopy(RECIPE)
    for key, value in settings.items():
        *sections, last = key.split("__")
        place = recipe
        for section in sections:
            place = place[section]
        place[last] = value
    command = f"python -m shardkit.launch recipe.yaml backend={name}"
    return Arm(name=name, command=command, recipe=recipe, explanation=explanation, runs=list(runs))


def changed(run: Run, first: int, **factors: float) -> Run:
    """The run with numbers multiplied from step `first` on."""
    train = [
        {**line, **{k: line[k] * factor for k, factor in factors.items() if line["step"] >= first}}
        for line in run.train
    ]
    return Run(**{**run.__dict__, "train": train})


def profile_of(kinds: dict[str, int], *, calls: int = 2, steps: int = 30, mib: int = 100) -> dict[str, Any]:
    """profile.json of two ranks; `kinds`: bytes of an optimizer step by collective."""
    counted = {kind: {"calls": calls, "bytes": size} for kind, size in kinds.items()}
    ranks = [
        {
            "rank": rank,
            "allocated_bytes": (mib + rank) * MIB,
            "reserved_bytes": (mib + 40) * MIB,
            "host_bytes": 400 * MIB,
            "communication": counted,
        }
        for rank in range(2)
    ]
    return {
        "ranks": ranks,
        "first_step_seconds": 0.5,
        "steps": steps,
        "checkpoint_bytes": 650_000,
        "save_seconds": 0.06,
        "load_seconds": 0.03,
    }


def whole_comparison() -> Comparison:
    """Everything a report can show: equal, different, inconclusive and failed arms, costs, several repeats."""
    psi = 4_000_000

    def runs(mib: int, kinds: dict[str, int], **more: Any) -> list[Run]:
        return [make_run(seed=i, profile=profile_of(kinds, mib=mib), **more) for i in range(3)]

    def told(kinds: dict[str, int]) -> dict[str, Any]:
        volumes = {kind: {"calls": 2, "bytes": size} for kind, size in kinds.items()}
        return {
            **BATCH_NORM,
            "dtypes": {"compute": "fp32"},
            "communication": volumes,
            "communication_least": volumes,
            "shards": "gradients" if "reduce_scatter" in kinds else "nothing",
        }

    reduced = {"all_reduce": psi}
    sharded = {"all_gather": 2 * psi, "reduce_scatter": psi}
    other = [changed(run, 1, loss=1.002, grad_norm=1.05) for run in runs(120, reduced)]
    error = Run(folder=Path("runs/gone"), status="failed", error="rank 1: <RuntimeError> & 'quotes'")
    arms = [
        make_arm("ddp", runs(160, reduced), told(reduced)),
        make_arm("fsdp2", runs(90, sharded, rounding=1e-8, seconds=0.15), told(sharded), backend__name="fsdp2"),
        make_arm("small-batches", other, told(reduced), batch__micro_batch_size=12),
        make_arm("short", [make_run(steps=2)], None),
        make_arm("<b>gone</b>", [error], None),
    ]
    return Comparison(arms=arms, reference="ddp", noise=[make_run(seed=9)])
