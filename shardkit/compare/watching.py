"""What a person sees while the jobs of a comparison run: a bar an arm on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardkit.compare.jobs import Job, Watcher


class Lines(Watcher):
    """A line a job."""

    def begins(self, job: Job, number: int, total: int) -> None:
        self._what = f"[{number}/{total}] {job.arm.name}, repeat {job.repeat}"

    def reached(self, job: Job, step: int) -> None:
        """Lines are for what has ended."""

    def ended(self, job: Job, seconds: float, error: str) -> None:
        how = f"failed: {error.splitlines()[0]}" if error else f"{job.steps} steps"
        print(f"{self._what}: {how} in {seconds:.1f} s", file=sys.stderr, flush=True)


class Bars(Watcher):
    """A bar an arm, over the steps of all its repeats."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, Any] = {}
        self._done: dict[str, int] = {}
        for name in dict.fromkeys(job.arm.name for job in jobs):
            own = [job for job in jobs if job.arm.name == name]
            self._done[name] = sum(job.steps for job in own if job.status == "completed")
            total = sum(job.steps for job in own)
            self._tasks[name] = self._bars.add_task(name, total=total, completed=self._done[name], state="")
        self._bars.start()

    def begins(self, job: Job, number: int, total: int) -> None:
        self._bars.update(self._tasks[job.arm.name], state=f"repeat {job.repeat}")

    def reached(self, job: Job, step: int) -> None:
        self._bars.update(self._tasks[job.arm.name], completed=self._done[job.arm.name] + min(step, job.steps))

    def ended(self, job: Job, seconds: float, error: str) -> None:
        self._done[job.arm.name] += job.steps
        state = f"failed: {error.splitlines()[0][:60]}" if error else ""
        self._bars.update(self._tasks[job.arm.name], completed=self._done[job.arm.name], state=state)

    def close(self) -> None:
        self._bars.stop()


@contextmanager
def watching(jobs: Sequence[Job]) -> Iterator[Watcher]:
    """Bars when standard error is a terminal, else lines."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    bars = Bars(jobs)
    try:
        yield bars
    finally:
        bars.close()
