"""The checkpoints of a recipe's run: where it begins, and what the loop saves."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.keeper import Keeper
from shardkit.checkpoint.restore import Choice
from shardkit.checkpoint.resume import Resumed, find, made_by, resume_from, start_from
from shardkit.checkpoint.storage import open_storage
from shardkit.checkpoint.training import training_state
from shardkit.checkpoint.weights import open_weights
from shardkit.errors import CheckpointError
from shardkit.seeds import read_streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim.lr_scheduler import LRScheduler

    from shardkit.checkpoint.history import Found
    from shardkit.checkpoint.storage import Storage
    from shardkit.checkpoint.training import Position
    from shardkit.data.order import GlobalOrder
    from shardkit.engines.api import Engine
    from shardkit.recipe.schema import Recipe
    from shardkit.run_folder import RunFolder
    from shardkit.world import World


def begin(
    recipe: Recipe,
    engine: Engine,
    storage: Storage,
    order: GlobalOrder,
    scheduler: LRScheduler | None,
    world: World,
) -> Resumed:
    """Go on from a checkpoint, or start with the weights of init_from, or with the model as it was built.

    Raises:
        CheckpointError: what was asked for cannot be used, or does not fit.
    """
    load = recipe.load
    choice = Choice(strict=load.strict, include=load.include, exclude=load.exclude, cast=load.cast, groups=load.groups)
    found = find(recipe.checkpoint.resume, storage, world, recipe.checkpoint.verify)
    if found is not None:
        own = found.storage is storage
        if own:
            agreed(world, f"{storage.root} cannot be used", lambda: _check_owner(found, recipe))
        if own and (recipe.init_from is not None or recipe.checkpoint.resume != "auto"):
            # What was left out of what the run began from has been trained since.
            choice = replace(choice, include=(), exclude=())
        return resume_from(
            found,
            engine,
            own=storage,
            order=order,
            scheduler=scheduler,
            choice=choice,
            seed=recipe.seed,
            world=world,
            schedule=recipe.scheduler,
        )
    if recipe.init_from is not None:
        path = recipe.init_from
        source = agreed(world, "init_from", lambda: open_weights(path, world))
        start_from(source, path, engine, choice, world)
    return Resumed()


def _check_owner(found: Found, recipe: Recipe) -> None:
    """Refuse to go on from another run whose folder has the same name.

    Raises:
        CheckpointError: names both.
    """
    was = made_by(found).get("run_dir")
    if not (recipe.checkpoint.folder and was and recipe.run_dir):
        return
    one, other = PurePath(was).parts, PurePath(recipe.run_dir).parts
    shorter = min(len(one), len(other))
    if one[-shorter:] != other[-shorter:]:
        raise CheckpointError(
            f"{found.storage.root} holds the checkpoints of run_dir={was}, and this run is {recipe.run_dir}: "
            "checkpoint.folder keeps a run's under the last name of its folder. Give one of the two another name or "
            f"checkpoint.folder, or go on from them all the same with checkpoint.resume={found.storage.root}"
        )


def storage_of(recipe: Recipe, folder: RunFolder) -> Storage:
    """The checkpoints of the run in `folder`: in it, or in a folder of its name where checkpoint.folder says."""
    elsewhere = recipe.checkpoint.folder
    return open_storage(
        f"{elsewhere.rstrip('/')}/{folder.path.resolve().name}" if elsewhere else str(folder.checkpoints)
    )


class RunCheckpoints:
    """What the loop saves; the recipe says when.

    Raises:
        CheckpointError: the folder cannot be written to, or another run is at work in it.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        storage: Storage,
        order: GlobalOrder,
        scheduler: LRScheduler | None,
        best: dict[str, Any] | None,
    ) -> None:
        self._recipe = recipe
        self._engine = engine
        self._order = order
        self._scheduler = scheduler
        world = engine.world
        agreed(world, "checkpoints cannot be saved", lambda: storage.claim() if world.rank == 0 else None)
        self._keeper = Keeper(engine, storage, recipe.checkpoint, best)

    def asks(self) -> bool:
        return self._keeper.asks()

    def is_due(self, step: int, *, asked: bool, scores: Mapping[str, float] | None) -> bool:
        return self._keeper.is_due(step, asked=asked, scores=scores)

    def save(self, position: Position) -> bool:
        world = self._engine.world
        training = training_state(
            position,
            self._order,
            scheduler=self._scheduler,
            normalization=self._engine.norms.applied.to_json(),
            seed=self._recipe.seed,
            world_size=world.size,
            best=self._keeper.best,
            recipe=asdict(self._recipe),
        )
        return self._keeper.save(position.step, training, read_streams(world.device))

    def close(self) -> int | None:
        return self._keeper.close()
