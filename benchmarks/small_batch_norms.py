"""What a small micro-batch does to BatchNorm under each policy, the global batch being the same throughout.

    python benchmarks/small_batch_norms.py
    python benchmarks/small_batch_norms.py --quick --output /tmp

Trains recipes/small-batch-norms.yaml for every policy, micro-batch and seed, and writes a table and a plot. Two
numbers of each run: the accuracy in evaluation, and how far the accuracy in training mode is from it on the same
held-out images, normalised in batches as a training step normalises them. `sync` runs on two ranks (backend ddp), and
its micro-batch is that of one rank: in one process it is `keep`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardkit
from shardkit.data.loader import Windows, num_items
from shardkit.data.order import GlobalOrder
from shardkit.engines import registry
from shardkit.engines.api import Engine
from shardkit.engines.opening import open_engine
from shardkit.evaluation import evaluate
from shardkit.loop import numbered
from shardkit.losses import Loss, adapt
from shardkit.normalization import commit
from shardkit.optimizer import maker
from shardkit.recipe.build import build
from shardkit.recipe.load import load
from shardkit.recipe.schema import Recipe
from shardkit.seeds import seed_alike, seed_apart
from shardkit.window import train_step
from shardkit.world import World

ROOT = Path(__file__).parents[1]
POLICIES = ("keep", "sync", "deferred", "exact", "group", "layer", "frozen")
MICRO_BATCHES = (2, 4, 8, 16, 32)
RANKS = {"sync": 2}
NAME = "small-batch-norms"
TITLES = ("accuracy in evaluation, %", "accuracy in training mode minus in evaluation, points")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run and what came of it, in percent."""

    policy: str
    micro_batch: int
    seed: int
    accuracy: float
    gap: float
    # Accuracy in training mode minus accuracy in evaluation, on the same images.


def recipe_of(policy: str, micro_batch: int, seed: int, overrides: Sequence[str]) -> Recipe:
    """The recipe of one run, as `python -m shardkit.launch` would load it."""
    chosen = [f"normalization.policy={policy}", f"batch.micro_batch_size={micro_batch}", f"seed={seed}", *overrides]
    if RANKS.get(policy, 1) > 1:
        chosen.append("backend=ddp")
    return load(ROOT / f"recipes/{NAME}.yaml", chosen, options_of=registry.options_of).recipe


def train(recipe: Recipe, world: World) -> tuple[float, float]:
    """Accuracy in evaluation and in training mode after the recipe's steps, in percent."""
    seed_alike(recipe.seed)
    engine = open_engine(
        recipe.backend,
        build(recipe.model),
        maker(recipe.optimizer, recipe.parameter_groups),
        world=world,
        max_grad_norm=recipe.train.max_grad_norm,
        normalization=recipe.normalization,
        micro_batch_size=recipe.batch.micro_batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps(world.size),
    )
    loss, scheduler = adapt(build(recipe.loss)), build(recipe.scheduler or {}, engine.optimizer)
    seed_apart(recipe.seed, world.rank)
    engine.model.train()
    for position, _, window in numbered(_training_windows(recipe, world), recipe.train.max_steps or 0):
        train_step(engine, window, loss, step=position.step, with_loss=False)
        scheduler.step()
    held_out = evaluate(engine, _eval_windows(recipe, world, recipe.evaluation.micro_batch_size or 1), loss)
    whole = recipe.normalization.policy == "exact"
    as_trained = recipe.batch.global_batch_size // world.size if whole else recipe.batch.micro_batch_size
    trained = training_accuracy(engine, _eval_windows(recipe, world, as_trained), loss)
    engine.close()
    return 100 * held_out.values["accuracy"], 100 * trained


def training_accuracy(engine: Engine, windows: Windows, loss: Loss) -> float:
    """Accuracy over `windows` in training mode, each micro-batch normalised as in training; changes the buffers."""
    totals = torch.zeros(2, dtype=torch.float64)
    engine.model.train()
    with engine.inference():
        for window in windows.epoch(0):
            for micro_batch in window:
                correct, count = loss.metrics(engine.model, micro_batch.batch)["accuracy"]
                totals += torch.tensor([float(correct), float(count)], dtype=torch.float64)
    commit(engine.norms.layers, engine.world, keep=False)
    correct, count = engine.world.sum(totals).tolist()
    return correct / count


def _training_windows(recipe: Recipe, world: World) -> Windows:
    items = build(recipe.data.train)
    order = GlobalOrder(
        num_items=num_items(items),
        global_batch_size=recipe.batch.global_batch_size,
        seed=recipe.seed,
        drop_last=recipe.data.drop_last,
    )
    return _cut(items, order, world, recipe.batch.micro_batch_size)


def _eval_windows(recipe: Recipe, world: World, micro_batch: int) -> Windows:
    items = build(recipe.data.eval or {})
    order = GlobalOrder.for_evaluation(num_items(items), world_size=world.size, micro_batch_size=micro_batch)
    return _cut(items, order, world, micro_batch)


def _cut(items: Any, order: GlobalOrder, world: World, micro_batch: int) -> Windows:
    return Windows(items, order=order, world_size=world.size, rank=world.rank, micro_batch_size=micro_batch)


def runs(policy: str, seeds: Sequence[int], overrides: Sequence[str], world: World) -> Iterator[Run]:
    """All runs of one policy, on this rank."""
    for micro_batch in MICRO_BATCHES:
        for seed in seeds:
            accuracy, trained = train(recipe_of(policy, micro_batch, seed, overrides), world)
            yield Run(policy=policy, micro_batch=micro_batch, seed=seed, accuracy=accuracy, gap=trained - accuracy)


def _on_ranks(rank: int, folder: str, policy: str, seeds: Sequence[int], overrides: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS[policy])
    made = [vars(run) for run in runs(policy, seeds, overrides, World.current("cpu"))]
    if rank == 0:
        (Path(folder) / "runs.json").write_text(json.dumps(made))
    dist.destroy_process_group()


def sweep(seeds: Sequence[int], overrides: Sequence[str]) -> Iterator[Run]:
    """All runs: one process in a loop, but for the policies that need ranks."""
    for policy in POLICIES:
        if policy not in RANKS:
            yield from runs(policy, seeds, overrides, World())
            continue
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_on_ranks, (folder, policy, seeds, overrides), nprocs=RANKS[policy])
            yield from (Run(**made) for made in json.loads((Path(folder) / "runs.json").read_text()))


def cell(values: Sequence[float], sign: str = "") -> str:
    """Mean and range over the seeds."""
    return f"{mean(values):{sign}.1f} ({min(values):{sign}.1f} to {max(values):{sign}.1f})"


def tables(made: Sequence[Run]) -> str:
    """Two markdown tables: accuracy and gap."""
    lines = []
    for title, field, sign in ((TITLES[0], "accuracy", ""), (TITLES[1], "gap", "+")):
        lines += [f"{title}: mean (range over seeds)", ""]
        lines += [f"| policy | {' | '.join(f'micro-batch {size}' for size in MICRO_BATCHES)} |"]
        lines += ["|---" * (len(MICRO_BATCHES) + 1) + "|"]
        for policy in POLICIES:
            cells = [
                cell([getattr(run, field) for run in made if (run.policy, run.micro_batch) == (policy, size)], sign)
                for size in MICRO_BATCHES
            ]
            lines.append(f"| `{policy}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def plot(made: Sequence[Run], path: Path) -> None:
    """Both numbers over the micro-batch, with the range over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5))
    for axis, title, field in zip(axes, TITLES, ("accuracy", "gap"), strict=True):
        for policy, marker in zip(POLICIES, "osDv^<x", strict=True):
            sizes = [
                [getattr(r, field) for r in made if (r.policy, r.micro_batch) == (policy, m)] for m in MICRO_BATCHES
            ]
            middle = [mean(values) for values in sizes]
            below = [m - min(values) for m, values in zip(middle, sizes, strict=True)]
            above = [max(values) - m for m, values in zip(middle, sizes, strict=True)]
            ranks = f" ({RANKS[policy]} ranks)" if policy in RANKS else ""
            axis.errorbar(
                MICRO_BATCHES, middle, yerr=[below, above], marker=marker, capsize=3, alpha=0.8, label=policy + ranks
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(MICRO_BATCHES, [str(size) for size in MICRO_BATCHES])
        axis.set_xlabel("micro-batch, images (global batch the same)")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep, print the tables, and write them and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the table and the plot")
    parser.add_argument("overrides", nargs="*", help="as for shardkit.launch: train.max_steps=44 data.train.size=4 ...")
    asked = parser.parse_args(argv)
    seeds = (0,) if asked.quick else (0, 1, 2)
    overrides = (*(("train.max_steps=22",) if asked.quick else ()), *asked.overrides)
    begun, made = time.monotonic(), []
    for run in sweep(seeds, overrides):
        made.append(run)
        print(
            f"{run.policy} micro-batch {run.micro_batch} seed {run.seed}: {run.accuracy:.1f} %, gap {run.gap:+.1f}",
            file=sys.stderr,
            flush=True,
        )
    recipe = recipe_of("keep", MICRO_BATCHES[0], 0, overrides)
    command = " ".join(["python", f"benchmarks/{Path(__file__).name}", *(["--quick"] if asked.quick else [])])
    text = (
        "# Small batches and norms\n\n"
        f"Made by `{' '.join([command, *asked.overrides])}`: recipes/{NAME}.yaml, {recipe.train.max_steps} steps of "
        f"{recipe.batch.global_batch_size} images, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}; shardkit "
        f"{shardkit.__version__}, torch {torch.__version__}, Python {platform.python_version()}, CPU.\n"
        "`sync` has 2 ranks, and its micro-batch is that of one rank.\n\n"
        f"![accuracy and gap over the micro-batch]({NAME}.png)\n\n{tables(made)}"
    )
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / f"{NAME}.md").write_text(text, encoding="utf-8")
    plot(made, asked.output / f"{NAME}.png")
    print(f"{text}\n{time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
