"""What rank 0 shows while it trains: a bar on a terminal, lines elsewhere; the log gets the lines either way."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 5.0
_FEW_STEPS = 20  # a run this short shows each of them


class Progress(Protocol):
    """Is told each step, and each line of the metrics that is written."""

    def step(self, step: int) -> None: ...

    def train(self, line: Mapping[str, Any]) -> None: ...

    def evaluation(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Silent:
    """Ranks that do not speak."""

    def step(self, step: int) -> None:
        """Nothing to show."""

    def train(self, line: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to close."""


class Watched:
    """Another's display, and who else wants to know when a step has been made."""

    def __init__(self, progress: Progress, made: Callable[[], None]) -> None:
        self._progress, self._made = progress, made

    def step(self, step: int) -> None:
        self._made()
        self._progress.step(step)

    def train(self, line: Mapping[str, Any]) -> None:
        self._progress.train(line)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._progress.evaluation(line)

    def close(self) -> None:
        self._progress.close()


class Lines:
    """A line now and then, without control characters."""

    def __init__(self, total: int, *, start: int = 0, terminal: bool = True) -> None:
        self._total, self._start = total, start
        self._terminal = terminal
        self._started = time.monotonic()
        self._last = float("-inf")

    def step(self, step: int) -> None:
        """Lines follow the metrics, not the steps."""

    def train(self, line: Mapping[str, Any]) -> None:
        now = time.monotonic()
        few = self._total - self._start <= _FEW_STEPS or line["step"] == self._total
        if not few and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        left = (now - self._started) / (line["step"] - self._start) * (self._total - line["step"])
        eta = f", {timedelta(seconds=round(left))} left" if line["step"] < self._total else ""
        self._say(f"step {line['step']}/{self._total}: {describe(line)}{eta}")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._say(f"step {line['step']}/{self._total}: {describe_evaluation(line)}")

    def close(self) -> None:
        """Nothing to close."""

    def _say(self, text: str) -> None:
        log.info(text, extra={"terminal": self._terminal})


class Bar:
    """A live bar on standard error; evaluations scroll above it."""

    def __init__(self, total: int, start: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._lines = Lines(total, start=start, terminal=False)
        self._total = total
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total, completed=start, numbers="")
        self._bar.start()

    def step(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def train(self, line: Mapping[str, Any]) -> None:
        self._bar.update(self._task, numbers=describe(line))
        self._lines.train(line)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._bar.console.print(
            f"step {line['step']}/{self._total}: {describe_evaluation(line)}", markup=False, highlight=False
        )
        self._lines.evaluation(line)

    def close(self) -> None:
        self._bar.stop()


def open_progress(total: int, start: int = 0) -> Progress:
    """The bar when standard error is a terminal, else lines; the run goes from step `start` to `total`."""
    return Bar(total, start) if sys.stderr.isatty() else Lines(total, start=start)


def describe(line: Mapping[str, Any]) -> str:
    """A training line of the metrics in words."""
    loss = "none" if line["loss"] is None else f"{line['loss']:.4g}"
    skipped = ", skipped" if line["skipped"] else ""
    return (
        f"loss {loss}, grad norm {line['grad_norm']:.3g}, {line['items_per_second']:.4g} items/s, "
        f"{line['memory_bytes'] / 2**20:.0f} MiB{skipped}"
    )


def describe_evaluation(line: Mapping[str, Any]) -> str:
    """An evaluation line of the metrics in words."""
    scores = ", ".join(f"{k} {v:.4g}" for k, v in line.items() if k not in {"kind", "step", "items", "seconds"})
    return f"eval {scores} ({line['items']} items)"
