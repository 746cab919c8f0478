"""The keeper of a run's checkpoints: saves, at once or in the background, and deletes what need not be kept."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.history import retire
from shardkit.checkpoint.save import Content, content_of, step_name, write_checkpoint
from shardkit.checkpoint.shard import Part, Snapshot
from shardkit.checkpoint.storage import Storage
from shardkit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from shardkit.engines.api import Engine
    from shardkit.recipe.schema import Checkpoint
    from shardkit.world import World

log = logging.getLogger(__name__)


class Keeper:
    """Saves of one run. All methods are collectives: every rank calls them at the same steps.

    Args:
        engine: whose state is saved.
        storage: the run's checkpoints.
        settings: the recipe's section.
        best: metric, value and step of the best evaluation so far, when the run goes on from a checkpoint.
    """

    def __init__(
        self, engine: Engine, storage: Storage, settings: Checkpoint, best: dict[str, Any] | None = None
    ) -> None:
        self.settings = settings
        best = self._still_best(best, engine, storage)
        self.best = best
        # The best score so far; a checkpoint of its step is there, or is being written.
        self._kept = best
        # The one whose checkpoint is on disk: the same, or the one before.
        self._kept_then = best
        # What that is when the save that runs has ended well.
        self._engine = engine
        self._storage = storage
        self._clock = time.monotonic()
        self._saved: int | None = None
        self._background = Background(engine.world.aside(), engine.optimizer) if settings.asynchronous else None

    def asks(self) -> bool:
        """Whether by this rank's clock it is time to save; rank 0's counts."""
        minutes = self.settings.every_minutes
        return minutes is not None and self._engine.world.rank == 0 and time.monotonic() - self._clock >= 60 * minutes

    def is_due(self, step: int, *, asked: bool, scores: Mapping[str, float] | None) -> bool:
        """Whether to save after `step`: its number, the clock of rank 0, or a new best score; notes the best.

        Raises:
            CheckpointError: the evaluation has no such metric.
        """
        every = self.settings.every
        better = self._note_best(step, scores) if scores is not None else False
        return better or asked or (every is not None and step % every == 0)

    def save(self, step: int, training: Mapping[str, Any], streams: bytes) -> bool:
        """Save the state after `step`; whether it is, or is being, saved.

        In the background the state is copied and training goes on; an error of the save before is raised here.

        Args:
            step: optimizer steps made.
            training: see `training_state`.
            streams: this rank's random streams.

        Raises:
            CheckpointError: it cannot be written, with on_save_error=raise.
        """
        if self._saved == step:
            return True
        self._clock = time.monotonic()
        begun = time.perf_counter()
        self.close()
        world = self._engine.world
        if "best" in training:
            # The save that was waited for may have been of the best, and have failed.
            training = {**training, "best": self.best}
        try:
            streamed = [streams_part(world.rank, streams)]
            content = content_of(self._engine, step=step, training=training, extra=streamed)
            write = functools.partial(self._write, best=self._name(self.best), kept=self._name(self._kept))
            if self._background:
                self._background.start(content, write, world)
            else:
                write(content, world)
        except CheckpointError as error:
            self._lost(step)
            self._tell(error)
            return False
        self._saved, self._kept_then = step, self.best
        if self._background is None:
            self._kept = self.best
        log.debug("checkpoint of step %d: training waited %.3f s", step, time.perf_counter() - begun)
        return True

    def close(self) -> int | None:
        """Wait for what is being written; the step of the last save that ended well, None = there is none.

        Raises:
            CheckpointError: it could not be, with on_save_error=raise.
        """
        if self._background is not None:
            try:
                self._background.wait()
                self._kept = self._kept_then
            except CheckpointError as error:
                self._lost(self._saved)
                self._tell(error)
        return self._saved

    def _write(self, content: Content, world: World, best: str | None, kept: str | None) -> None:
        begun = time.perf_counter()
        name = write_checkpoint(self._storage, content, world, export=self.settings.export)
        # The best before stays until the new best is on disk.
        keep = {each for each in (name, best, None if name == best else kept) if each is not None}
        deleted = retire(self._storage, keep_last=self.settings.keep_last, keep=keep, world=world)
        if world.rank == 0:
            log.debug("saved %s in %.3f s; deleted %s", name, time.perf_counter() - begun, ", ".join(deleted) or "none")

    def _note_best(self, step: int, scores: Mapping[str, float]) -> bool:
        metric = self.settings.best_metric
        if metric is None:
            return False
        if metric not in scores:
            raise CheckpointError(
                f"checkpoint.keep_best: the evaluation has no metric {metric!r}; it has {', '.join(scores)}"
            )
        better = self.settings.is_better(scores[metric], self.best["value"] if self.best else None)
        if better:
            self.best = {"metric": metric, "value": scores[metric], "step": step, "which": self.settings.best}
        return better

    def _still_best(self, best: dict[str, Any] | None, engine: Engine, storage: Storage) -> dict[str, Any] | None:
        """The best of the checkpoint that the run goes on from, if it is one by these settings and is kept here."""
        if best is None or (best["metric"], best.get("which")) != (self.settings.best_metric, self.settings.best):
            return None
        world, name = engine.world, step_name(best["step"])
        there = agreed(world, f"{storage.root} cannot be used", lambda: world.rank != 0 or name in storage.names())
        return best if world.gather(there)[0] else None

    def _name(self, best: Mapping[str, Any] | None) -> str | None:
        return None if best is None else step_name(best["step"])

    def _lost(self, step: int | None) -> None:
        """The save of `step` failed: if it was of the best, the one before is the best there is."""
        if self.best is not None and self.best["step"] == step:
            self.best = self._kept
        self._kept_then, self._saved = self._kept, None

    def _tell(self, error: CheckpointError) -> None:
        if self.settings.on_save_error == "raise":
            raise error
        if self._engine.world.rank == 0:
            log.warning("%s (checkpoint.on_save_error=warn: training does not end)", error)


class Background:
    """One save at a time in a thread, from a snapshot, over process groups that training does not use."""

    def __init__(self, world: World, optimizer: torch.optim.Optimizer) -> None:
        self._world = world
        self._copied = threading.Event()
        self._copied.set()
        # The moments are copied behind training's back until the step that changes them.
        optimizer.register_step_pre_hook(lambda *_: void(self._copied.wait()))
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, content: Content, write: Callable[[Content, World], None], world: World) -> None:
        """Copy `content` and write the copy; the optimizer's next step waits for the last of it to be copied.

        Raises:
            CheckpointError: on all ranks of `world`: there is no memory for the copy.
        """
        failed = f"checkpoint of step {content.step} was not saved"
        parts, copy_moments = agreed(world, failed, lambda: self._snapshot.take(content.parts))
        taken = replace(content, parts=parts)
        self._copied.clear()

        def run() -> None:
            try:
                try:
                    copy_moments()
                finally:
                    self._copied.set()
                write(taken, self._world)
            except Exception as error:
                self._error = error

        # A daemon: an error in training must end the process.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the save that runs has ended.

        Raises:
            CheckpointError: it failed, which all ranks know.
            Exception: whatever else ended it on this rank, as a peer that has gone.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def void(_: object) -> None:
    """A hook's return value would be taken for arguments of the step."""


def streams_part(rank: int, data: bytes) -> Part:
    """A rank's random streams, as a part of its shard."""
    import torch

    tensor: torch.Tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Part(key=("rng", str(rank), None), shape=(len(data),), dtype="U8", start=0, tensor=tensor)
