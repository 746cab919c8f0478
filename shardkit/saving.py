"""The checkpoints of a recipe's run: where it begins, and what the loop saves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.keeper import Keeper
from shardkit.checkpoint.restore import Choice
from shardkit.checkpoint.resume import Resumed, find, resume_from, start_from
from shardkit.checkpoint.storage import open_storage
from shardkit.checkpoint.training import training_state
from shardkit.checkpoint.weights import open_weights
from shardkit.seeds import read_streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim.lr_scheduler import LRScheduler

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
        return resume_from(
            found,
            engine,
            own=storage,
            order=order,
            scheduler=scheduler,
            choice=choice,
            seed=recipe.seed,
            world=world,
        )
    if recipe.init_from is not None:
        path = recipe.init_from
        source = agreed(world, "init_from", lambda: open_weights(path, world))
        start_from(source, path, engine, choice, world)
    return Resumed()


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
