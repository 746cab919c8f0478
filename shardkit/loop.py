"""The loop: windows into optimizer steps, schedule and evaluations counted in steps, and the lines about them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardkit import metrics
from shardkit.checkpoint.training import Position
from shardkit.errors import CheckpointError
from shardkit.window import WindowReport, train_step

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from shardkit.data.loader import MicroBatch, Windows
    from shardkit.data.order import GlobalOrder
    from shardkit.engines.api import Engine
    from shardkit.evaluation import Scores
    from shardkit.losses import Loss
    from shardkit.progress import Progress
    from shardkit.recipe.schema import Train

log = logging.getLogger(__name__)
BEGINNING = Position()


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How long the loop goes on, and on which steps it does more than step."""

    steps: int
    # Of the whole run.
    stop_at: int | None = None
    # End there all the same, early; the schedule is that of all steps.
    metrics_every: int = 1
    evaluate_every: int | None = None
    save_last: bool = False

    @property
    def last(self) -> int:
        """The step this run ends after."""
        return self.steps if self.stop_at is None else min(self.steps, self.stop_at)

    def writes(self, step: int) -> bool:
        return step % self.metrics_every == 0 or step == self.last

    def evaluates(self, step: int) -> bool:
        return step == self.steps or (self.evaluate_every is not None and step % self.evaluate_every == 0)


@dataclass(frozen=True, kw_only=True)
class Journal:
    """Where the lines of a run go; ranks other than 0 have no writers."""

    writers: Sequence[metrics.Writer]
    progress: Progress

    def write(self, line: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(line)

    def close(self) -> None:
        self.progress.close()
        for writer in self.writers:
            writer.close()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a loop has to say at its end."""

    steps: int
    # Of the run, those before a resume included.
    seconds: float
    # Of this loop.
    scores: Scores | None
    # Of the last step's evaluation.
    stopped: bool = False
    # It ended before the last step, as it was asked to, with a checkpoint.


class Saving(Protocol):
    """What the loop asks of the checkpoints of a run; every rank asks the same."""

    def asks(self) -> bool:
        """Whether this rank wants a checkpoint after the coming step."""
        ...

    def is_due(self, step: int, *, asked: bool, scores: Mapping[str, float] | None) -> bool:
        """Whether there shall be a checkpoint after `step`; `asked`: a rank wanted one."""
        ...

    def save(self, position: Position) -> bool:
        """Make the checkpoint of a position; whether it is there, or being written."""
        ...

    def close(self) -> int | None:
        """Wait for what is still being written; the step of the last checkpoint that was, None = none was."""
        ...


def total_steps(train: Train, order: GlobalOrder, position: Position) -> int:
    """Optimizer steps of the whole run that stands at `position`."""
    if train.max_steps is not None:
        return train.max_steps
    epochs = (train.max_epochs or 0) - position.epoch
    # The epoch that was begun may go on with windows of another size than it began with.
    rest = order.steps_from(position.samples) + (epochs - 1) * order.steps_per_epoch if epochs > 0 else 0
    return position.step + rest


def fit(
    engine: Engine,
    windows: Windows,
    loss: Loss,
    *,
    nonfinite: str,
    cadence: Cadence,
    scheduler: LRScheduler | None,
    evaluate: Callable[[], Scores] | None,
    journal: Journal,
    start: Position = BEGINNING,
    saving: Saving | None = None,
) -> Outcome:
    """Train until `cadence.last` optimizer steps are made, from where `start` is.

    Raises:
        NonFiniteError: a gradient is not finite, with nonfinite="error".
        CheckpointError: a checkpoint cannot be written, with on_save_error=raise.
    """
    begun = time.perf_counter()
    scores = None
    engine.model.train()
    started = begun
    for position, epoch, window in numbered(windows, cadence.last, start):
        step = position.step
        lr = float(engine.optimizer.param_groups[0]["lr"])
        writes = cadence.writes(step)
        asks = saving is not None and saving.asks()
        report = train_step(engine, window, loss, nonfinite=nonfinite, step=step, with_loss=writes, ask=asks)
        if scheduler is not None and not report.skipped:
            scheduler.step()
        # The gradient norm came to the host in train_step, so the clock needs no synchronisation of its own.
        seconds = time.perf_counter() - started
        journal.progress.step(step)
        if writes:
            line = train_line(step, epoch, report, lr, seconds, engine.world.device.type)
            journal.write(line)
            journal.progress.train(line)
        scores = None
        if evaluate is not None and cadence.evaluates(step):
            scores = evaluate()
            line = eval_line(step, scores)
            journal.write(line)
            journal.progress.evaluation(line)
        if saving is not None:
            due = saving.is_due(step, asked=report.asked, scores=scores.values if scores else None)
            if due or (step == cadence.last and (cadence.save_last or step < cadence.steps)):
                begun_save = time.perf_counter()
                if saving.save(position):
                    # What training waited; in the background it is written for longer.
                    journal.write({"kind": "checkpoint", "step": step, "seconds": time.perf_counter() - begun_save})
        started = time.perf_counter()
    saved = saving.close() if saving is not None else None
    steps = max(start.step, cadence.last)
    if start.step < steps < cadence.steps and saved != steps:
        raise CheckpointError(
            f"stopped at step {steps} as asked, and its checkpoint could not be written: there is nothing to go on from"
        )
    outcome = Outcome(steps=steps, seconds=time.perf_counter() - begun, scores=scores, stopped=steps < cadence.steps)
    status = {"status": "stopped", "resumable": True} if outcome.stopped else {"status": "completed"}
    journal.write({"kind": "end", **status, "steps": steps, "seconds": outcome.seconds})
    return outcome


def numbered(
    windows: Windows, steps: int, start: Position = BEGINNING
) -> Iterator[tuple[Position, int, list[MicroBatch]]]:
    """(position after it, epoch from 0, window) until `steps` steps are made, over as many epochs as that takes."""
    position = start
    while position.step < steps:
        epoch = position.epoch
        for window in windows.epoch(epoch, position.samples):
            position = position.after(windows.order)
            yield position, epoch, window
            if position.step == steps:
                return


def train_line(
    step: int, epoch: int, report: WindowReport, lr: float, seconds: float, device_type: str
) -> dict[str, Any]:
    """A training line of metrics.jsonl."""
    return {
        "kind": "train",
        "step": step,
        "epoch": epoch,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": lr,
        "items": metrics.whole(report.items),
        "seconds": seconds,
        "items_per_second": report.items / seconds,
        "memory_bytes": metrics.memory_bytes(device_type),
        "skipped": report.skipped,
    }


def eval_line(step: int, scores: Scores) -> dict[str, Any]:
    """An evaluation line of metrics.jsonl."""
    return {"kind": "eval", "step": step, **scores.values, "items": metrics.whole(scores.items)}
