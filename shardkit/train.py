"""What one rank runs, top to bottom: `python -m shardkit.train RUN_DIR`, or a recipe under an outer launcher.

torch is imported only after the process is set up: a rank's output, from its first line on, is in its own log.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit import environment, metrics, progress, run_folder
from shardkit.engines import registry
from shardkit.errors import EngineError, RequestError
from shardkit.launch import outer, preflight, process
from shardkit.launch.guard import guarded
from shardkit.recipe.load import load
from shardkit.run_folder import RunFolder

if TYPE_CHECKING:
    from shardkit.checkpoint.resume import Resumed
    from shardkit.data.loader import Windows
    from shardkit.loop import Journal, Outcome, Saving
    from shardkit.normalization.report import Applied
    from shardkit.profile import Profile
    from shardkit.recipe.load import Loaded
    from shardkit.recipe.schema import Recipe
    from shardkit.world import World

log = logging.getLogger("shardkit.train")  # the module itself runs as __main__


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank; the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m shardkit.train", description=__doc__)
    parser.add_argument("target", help="the run folder, or with --outer the recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--agent", type=int, help="process id of the agent that started this rank")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--outer", choices=["torchrun", "srun"], help="the launcher that started this rank")
    asked = parser.parse_args(argv)
    process.end_with(asked.agent)
    process.default_signals()
    if asked.outer:
        loaded = load(asked.target, asked.overrides, options_of=registry.options_of)
        # torchrun shows what a rank recorded; srun knows nothing of it.
        return guarded(lambda: _under_outer(loaded, asked.outer), tell=os.dup(2) if asked.outer == "srun" else None)
    folder = RunFolder(Path(asked.target))
    process.take_output(folder.log(asked.rank), terminal=asked.rank == 0)
    return guarded(lambda: _in_folder(folder))


def train(recipe: Recipe, world: World, folder: RunFolder) -> bool:
    """Build what the recipe names, train, and say how it went; whether it stopped early, with a checkpoint."""
    if not recipe.metrics.profile:
        return _train(recipe, world, folder, None)
    from shardkit.profile import newest_bytes, profiling
    from shardkit.saving import storage_of

    with profiling(world) as profile:
        stopped = _train(recipe, world, folder, profile)
        profile.write(folder.path / "profile.json", newest_bytes(storage_of(recipe, folder)))
    return stopped


def _train(recipe: Recipe, world: World, folder: RunFolder, profile: Profile | None) -> bool:
    import torch

    from shardkit.engines.opening import open_engine
    from shardkit.evaluation import evaluate
    from shardkit.ledger import Ledger
    from shardkit.loop import Cadence, fit, total_steps
    from shardkit.losses import adapt
    from shardkit.optimizer import maker
    from shardkit.recipe.build import build, build_scheduler
    from shardkit.saving import RunCheckpoints, begin, storage_of
    from shardkit.seeds import seed_alike, seed_apart

    _import_backend(recipe.backend.adapter)
    process.quiet_libraries()
    seed_alike(recipe.seed)
    model = build(recipe.model)
    if not isinstance(model, torch.nn.Module):
        raise EngineError(f"model: {recipe.model['_target_']} made {type(model).__name__}; expected a torch.nn.Module")
    windows, eval_windows = _open_windows(recipe, world)
    loss = adapt(build(recipe.loss))
    ledger = Ledger(world, model) if recipe.metrics.memory else None
    engine = open_engine(
        recipe.backend,
        model,
        maker(recipe.optimizer, recipe.parameter_groups),
        world=world,
        max_grad_norm=recipe.train.max_grad_norm,
        precision=recipe.train.precision,
        blocks=recipe.blocks,
        activation_checkpointing=recipe.activation_checkpointing,
        normalization=recipe.normalization,
        micro_batch_size=recipe.batch.micro_batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps(world.size),
    )
    if world.rank == 0:
        _report_norms(engine.norms.applied, folder)
    scheduler = build_scheduler(recipe.scheduler, engine.optimizer) if recipe.scheduler is not None else None
    seed_apart(recipe.seed, world.rank)
    storage = storage_of(recipe, folder)
    begun = time.perf_counter()
    resumed = begin(recipe, engine, storage, windows.order, scheduler, world)
    if profile is not None and (resumed.checkpoint is not None or recipe.init_from is not None):
        profile.loaded(time.perf_counter() - begun)
    if world.rank == 0:
        _take_up(resumed, recipe, world, folder)
    cadence = Cadence(
        steps=total_steps(recipe.train, windows.order, resumed.position),
        stop_at=recipe.train.stop_at_step,
        metrics_every=recipe.metrics.every,
        evaluate_every=recipe.evaluation.every,
        save_last=recipe.saves and recipe.checkpoint.final,
    )
    saving: Saving | None = None
    if recipe.saves:
        saving = RunCheckpoints(recipe, engine, storage, windows.order, scheduler, resumed.best)
    scores = (lambda: evaluate(engine, eval_windows, loss)) if eval_windows is not None else None
    if resumed.position.step >= cadence.last and world.rank == 0:
        log.info("shardkit: %d steps are asked for, and %d are made", cadence.last, resumed.position.step)
    journal = _open_journal(recipe, world, folder, cadence.last, resumed)
    if ledger is not None:
        ledger.watch(engine)
        journal = replace(journal, progress=progress.Watched(journal.progress, ledger.step))
    if profile is not None:
        journal = replace(journal, progress=profile.watching(journal.progress))
        saving = profile.saving(saving) if saving is not None else None
        scores = profile.uncounted(scores) if scores is not None else None
    try:
        outcome = fit(
            engine,
            windows,
            loss,
            nonfinite=recipe.train.nonfinite,
            cadence=cadence,
            scheduler=scheduler,
            evaluate=scores,
            journal=journal,
            start=resumed.position,
            saving=saving,
        )
    finally:
        journal.close()
    if ledger is not None:
        ledger.write(folder.path / "memory.json")
    engine.close()
    if world.rank == 0:
        log.info("%s", _summary(outcome, folder))
    return outcome.stopped


def _take_up(resumed: Resumed, recipe: Recipe, world: World, folder: RunFolder) -> None:
    """Make the metrics of a folder that held a run those of a run that stands where this one begins."""
    if resumed.checkpoint is None:
        if folder.metrics.exists():
            kept = metrics.set_aside(folder.metrics)
            log.info("shardkit: the run in this folder left no checkpoint: it begins anew; its metrics are %s", kept)
        return
    facts = {"checkpoint": resumed.checkpoint, "backend": recipe.backend.name, "world_size": world.size}
    metrics.resume(folder.metrics, resumed.position.step, **facts)


def _report_norms(applied: Applied, folder: RunFolder) -> None:
    """Write what the policy did to each layer; say it where it did something."""
    folder.normalization.write_text(applied.table(), encoding="utf-8")
    if applied.layers or applied.explanation or applied.policy != "keep":
        log.info("%s", applied.table().rstrip())


def _in_folder(folder: RunFolder) -> int:
    """Train the recipe that the launcher has put into `folder`."""
    from shardkit.world import join

    recipe = load(folder.recipe, [], options_of=registry.options_of).recipe
    with join(recipe.launch.device, recipe.launch.timeout_seconds) as world:
        if world.rank == 0:
            environment.add_world(folder, world)
        train(recipe, world, folder)
    return 0


def _under_outer(loaded: Loaded, launcher: str) -> int:
    """Check the recipe on all ranks, agree on rank 0's run folder, and train there."""
    from shardkit.world import join

    recipe = loaded.recipe
    with join(recipe.launch.device, recipe.launch.timeout_seconds) as world:
        refused = [line for line in world.gather(_problems(loaded, world.size)) if line]
        chosen, why = world.gather(_make_folder(loaded) if world.rank == 0 and not refused else ("", ""))[0]
        refused += [why] if why else []
        if refused:
            if world.rank == 0:
                print(refused[0], file=sys.stderr, flush=True)
            world.barrier()
            return RequestError.exit_code
        folder = RunFolder(Path(chosen))
        process.take_output(folder.log(world.rank), terminal=world.rank == 0)
        try:
            stopped = train(recipe, world, folder)
        except Exception as error:
            if world.rank == 0:
                metrics.end(folder.metrics, status="failed", error=f"{type(error).__name__}: {error}")
            raise
    return outer.code_of_stop(launcher) if stopped else 0


def _import_backend(adapter: str) -> None:
    """Import an adapter with its libraries, so that the loggers these bring can be told to be quiet."""
    registry.load(adapter)
    registration = registry.BUILT_IN.get(adapter)
    # While they are imported they only tell what they find, like that there is no accelerator.
    logging.disable(logging.WARNING)
    for library in registration.needs if registration else ():
        importlib.import_module(library)
    logging.disable(logging.NOTSET)


def _problems(loaded: Loaded, world_size: int) -> str:
    """What the second pass refuses on this rank's machine; empty when it passes."""
    try:
        preflight.check(loaded, world_size=world_size)
    except RequestError as error:
        return str(error)
    return ""


def _make_folder(loaded: Loaded) -> tuple[str, str]:
    """(the new run folder, "") or ("", why there is none)."""
    try:
        recipe = loaded.recipe
        folder = run_folder.choose(
            recipe.name, recipe.run_dir, resume=recipe.checkpoint.resume, place=loaded.place("run_dir")
        )
        folder.open(loaded.to_yaml())
        environment.write_machine(folder, environment.command_line())
    except RequestError as error:
        return "", str(error)
    return str(folder.path.resolve()), ""


def _open_windows(recipe: Recipe, world: World) -> tuple[Windows, Windows | None]:
    """This rank's windows for training and for evaluation."""
    from shardkit.data.loader import Windows, num_items
    from shardkit.data.order import GlobalOrder
    from shardkit.recipe.build import build

    data, batch = recipe.data, recipe.batch

    def cut(dataset: object, order: GlobalOrder, micro_batch_size: int) -> Windows:
        return Windows(
            dataset,
            order=order,
            world_size=world.size,
            rank=world.rank,
            micro_batch_size=micro_batch_size,
            num_workers=data.num_workers,
            collate=build(data.collate) if data.collate is not None else None,
            device=world.device,
            seed=recipe.seed,
        )

    items = build(data.train)
    order = GlobalOrder(
        num_items=num_items(items),
        global_batch_size=batch.global_batch_size,
        seed=recipe.seed,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
    )
    windows = cut(items, order, batch.micro_batch_size)
    if data.eval is None:
        return windows, None
    items = build(data.eval)
    size = recipe.evaluation.micro_batch_size or batch.micro_batch_size
    order = GlobalOrder.for_evaluation(num_items(items), world_size=world.size, micro_batch_size=size)
    return windows, cut(items, order, size)


def _open_journal(recipe: Recipe, world: World, folder: RunFolder, steps: int, resumed: Resumed) -> Journal:
    from shardkit.loop import Journal

    if world.rank != 0:
        return Journal(writers=[], progress=progress.Silent())
    writers: list[metrics.Writer] = [metrics.MetricsFile(folder.metrics)]
    if recipe.metrics.tensorboard:
        resumed_at = resumed.position.step if resumed.checkpoint is not None else None
        writers.append(metrics.TensorBoard(folder.tensorboard, resumed_at=resumed_at))
    return Journal(writers=writers, progress=progress.open_progress(steps, resumed.position.step))


def _summary(outcome: Outcome, folder: RunFolder) -> str:
    scores = outcome.scores
    evaluated = "".join(f", eval {name} {value:.4g}" for name, value in scores.values.items()) if scores else ""
    how = "stopped as asked, to go on when it is started again, after" if outcome.stopped else "completed"
    return f"shardkit: {how} {outcome.steps} steps in {outcome.seconds:.1f} s{evaluated}; run folder {folder.path}"


if __name__ == "__main__":
    process.leave(main())
