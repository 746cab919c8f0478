"""The loop: windows into optimizer steps, schedule and evaluations counted in steps, and the lines about them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit import metrics
from shardkit.window import WindowReport, train_step

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from shardkit.data.loader import MicroBatch, Windows
    from shardkit.engines.api import Engine
    from shardkit.evaluation import Scores
    from shardkit.losses import Loss
    from shardkit.progress import Progress
    from shardkit.recipe.schema import Train

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How long the loop goes on, and on which steps it does more than step."""

    steps: int
    metrics_every: int = 1
    evaluate_every: int | None = None

    def writes(self, step: int) -> bool:
        return step % self.metrics_every == 0 or step == self.steps

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
    """What a completed loop has to say."""

    steps: int
    seconds: float
    scores: Scores | None
    # Of the last step's evaluation.


def total_steps(train: Train, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return train.max_steps if train.max_steps is not None else (train.max_epochs or 0) * steps_per_epoch


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
) -> Outcome:
    """Train for `cadence.steps` optimizer steps.

    Raises:
        NonFiniteError: a gradient is not finite, with nonfinite="error".
    """
    begun = time.perf_counter()
    scores = None
    engine.model.train()
    started = begun
    for step, epoch, window in numbered(windows, cadence.steps):
        lr = float(engine.optimizer.param_groups[0]["lr"])
        writes = cadence.writes(step)
        report = train_step(engine, window, loss, nonfinite=nonfinite, step=step, with_loss=writes)
        if scheduler is not None and not report.skipped:
            scheduler.step()
        # The gradient norm came to the host in train_step, so the clock needs no synchronisation of its own.
        seconds = time.perf_counter() - started
        journal.progress.step(step)
        if writes:
            line = train_line(step, epoch, report, lr, seconds, engine.world.device.type)
            journal.write(line)
            journal.progress.train(line)
        if evaluate is not None and cadence.evaluates(step):
            scores = evaluate()
            line = eval_line(step, scores)
            journal.write(line)
            journal.progress.evaluation(line)
        started = time.perf_counter()
    outcome = Outcome(steps=cadence.steps, seconds=time.perf_counter() - begun, scores=scores)
    journal.write({"kind": "end", "status": "completed", "steps": outcome.steps, "seconds": outcome.seconds})
    return outcome


def numbered(windows: Windows, steps: int) -> Iterator[tuple[int, int, list[MicroBatch]]]:
    """(step from 1, epoch from 0, window), over as many epochs as `steps` takes."""
    step, epoch = 0, 0
    while step < steps:
        for window in windows.epoch(epoch):
            step += 1
            yield step, epoch, window
            if step == steps:
                return
        epoch += 1


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
