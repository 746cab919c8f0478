"""The jobs of a comparison: each repeat of each arm as a launch of its own, in turn, gone on with when cut off."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardkit.compare.arms import ArmRequest
from shardkit.errors import RequestError

PLAN = "comparison.json"
POLL = 0.3
# Seconds between looks at how far a job has come.


@dataclass(frozen=True, kw_only=True)
class Job:
    """One repeat of an arm."""

    arm: ArmRequest
    repeat: int
    folder: Path
    steps: int
    # It makes.
    settings: tuple[str, ...]
    # Over the arm's own.

    @property
    def status(self) -> str:
        """completed, stopped, failed, or "" when it has not ended."""
        lines = _lines(self.folder / "metrics.jsonl")
        last = lines[-1] if lines else {}
        if last.get("kind") != "end":
            return ""
        whole = last.get("status") == "completed" or (last.get("status") == "stopped" and last.get("resumable") is True)
        return "completed" if whole else str(last.get("status"))

    @property
    def step(self) -> int:
        """The last step its metrics tell of."""
        return max((line["step"] for line in _lines(self.folder / "metrics.jsonl") if "step" in line), default=0)


class Watcher(Protocol):
    """Is told how the jobs go."""

    def begins(self, job: Job, number: int, total: int) -> None: ...

    def reached(self, job: Job, step: int) -> None: ...

    def ended(self, job: Job, seconds: float, error: str) -> None: ...


def plan(folder: Path, arms: list[ArmRequest], facts: dict[str, Any]) -> None:
    """Write down what is compared, or find that the folder holds the same comparison, to go on with it.

    Raises:
        RequestError: it holds something else.
    """
    wanted = {"arms": [arm.to_json() for arm in arms], **facts}
    path = folder / PLAN
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != wanted:
            raise RequestError(f"{str(folder)!r} holds another comparison ({PLAN}); give a new folder with --output")
        return
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(f"{str(folder)!r} is not empty, and holds no comparison to go on with; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")


def in_turn(arms: list[ArmRequest], repeats: int, make: Callable[[ArmRequest, int], Job]) -> Iterator[Job]:
    """A B A B: what else the machine does meets all arms."""
    for repeat in range(1, repeats + 1):
        for arm in arms:
            yield make(arm, repeat)


def run(jobs: list[Job], watcher: Watcher) -> dict[tuple[str, int], str]:
    """Run those that have not ended well; (arm, repeat) -> how it failed, of those that did.

    A job that fails does not keep the others from running. A Ctrl-C reaches the job too, and ends both.
    """
    failures: dict[tuple[str, int], str] = {}
    for number, job in enumerate(jobs, 1):
        if job.status == "completed":
            continue
        watcher.begins(job, number, len(jobs))
        begun = time.monotonic()
        error = _launch(job, watcher)
        watcher.ended(job, time.monotonic() - begun, error)
        if error:
            failures[job.arm.name, job.repeat] = error
    return failures


def _launch(job: Job, watcher: Watcher) -> str:
    """Run a job to its end; why it failed, or nothing."""
    words = [*job.arm.overrides, *job.settings, f"run_dir={job.folder}"]
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    output = job.folder.parent / f"{job.folder.name}.log"
    with output.open("w", encoding="utf-8") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", "shardkit.launch", job.arm.recipe, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                try:
                    code = started.wait(POLL)
                    break
                except subprocess.TimeoutExpired:
                    watcher.reached(job, job.step)
        except BaseException:
            # It ends its ranks by itself; a terminal's Ctrl-C has reached it already, and a second does no harm.
            started.send_signal(signal.SIGINT)
            started.wait()
            raise
    watcher.reached(job, job.step)
    if code in (0, 75) and job.status == "completed":
        return ""
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = next((line for line in reversed(lines) if line.startswith("shardkit:") and "logs of" not in line), "")
    ended = _lines(job.folder / "metrics.jsonl")[-1:]
    return (ended[0].get("error") if ended else None) or said or (lines[-1] if lines else f"exit code {code}")


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # being written
    return found
