"""The jobs of a comparison: each repeat of each arm as a launch of its own, in turn, gone on with when cut off."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from shardkit.compare.arms import ArmRequest
from shardkit.errors import RequestError
from shardkit.jobs import POLL, launched, metrics_lines, status
from shardkit.recipe.schema import Recipe
from shardkit.run_folder import is_held

PLAN = "comparison.json"
FAILED, DIFFERENT = 1, 5
# Exit codes: a job did not run to its end; not all are equal.


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
        return status(self.folder)

    @property
    def step(self) -> int:
        """The last step its metrics tell of."""
        return max((line["step"] for line in metrics_lines(self.folder) if "step" in line), default=0)


class Watcher(Protocol):
    """Is told how the jobs go."""

    def begins(self, job: Job, number: int, total: int) -> None: ...

    def reached(self, job: Job, step: int) -> None: ...

    def ended(self, job: Job, seconds: float, error: str) -> None: ...


def make_folder(command: str, output: Path | None) -> Path:
    """The folder of a command's runs, made where it is not there: `output`, or one named by the time.

    Raises:
        RequestError: it cannot be made.
    """
    path = output or Path("runs") / command / time.strftime("%Y%m%d-%H%M%S")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--output {str(path)!r} cannot be made a folder: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise RequestError(f"--output {str(path)!r} cannot be written into")
    return path


def plan(folder: Path, arms: list[ArmRequest], recipes: dict[str, Recipe], facts: dict[str, Any]) -> None:
    """Write down what is compared, or find that the folder holds the same comparison, to go on with it.

    Args:
        folder: of the comparison, which is there.
        arms: what each runs.
        recipes: of each arm by its name, resolved: a file may be edited before a comparison is gone on with.
        facts: what else decides what is run.

    Raises:
        RequestError: it holds something else.
    """
    resolved = {name: asdict(recipe) for name, recipe in recipes.items()}
    wanted = json.loads(
        json.dumps({"arms": [arm.to_json() for arm in arms], "recipes": resolved, **facts}, default=str)
    )
    path = folder / PLAN
    if path.exists():
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RequestError(f"{path} cannot be read ({error}); give a new folder with --output") from None
        if there != wanted:
            why = _edited(there, wanted)
            raise RequestError(
                f"{str(folder)!r} holds another comparison ({PLAN}{why}); give a new folder with --output"
            )
        return
    if any(folder.iterdir()):
        raise RequestError(f"{str(folder)!r} is not empty, and holds no comparison to go on with; give a new folder")
    path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")


def _edited(there: Any, wanted: dict[str, Any]) -> str:
    """Which sections of an arm's recipe are not what they were; empty where more than that is another."""
    if not isinstance(there, dict) or {**there, "recipes": None} != {**wanted, "recipes": None}:
        return ""
    name, recipe = next((n, r) for n, r in wanted["recipes"].items() if there["recipes"].get(n) != r)
    before = there["recipes"].get(name) or {}
    keys = [key for key in recipe if recipe[key] != before.get(key)]
    return f": since then {', '.join(keys)} of arm {name} has changed"


def in_turn(arms: list[ArmRequest], repeats: int, make: Callable[[ArmRequest, int], Job]) -> Iterator[Job]:
    """A B A B: what else the machine does meets all arms."""
    for repeat in range(1, repeats + 1):
        for arm in arms:
            yield make(arm, repeat)


def run(jobs: list[Job], watcher: Watcher) -> dict[tuple[str, int], str]:
    """Run those that have not ended well; (arm, repeat) -> how it failed, of those that did.

    A job that fails does not keep the others from running. A Ctrl-C reaches the job too, and ends both. One that is
    still at work, as after a kill of the command alone, is waited for.
    """
    failures: dict[tuple[str, int], str] = {}
    for number, job in enumerate(jobs, 1):
        if job.status == "completed":
            continue
        watcher.begins(job, number, len(jobs))
        begun = time.monotonic()
        while is_held(job.folder):
            watcher.reached(job, job.step)
            time.sleep(POLL)
        if job.status == "completed":
            watcher.ended(job, time.monotonic() - begun, "")
            continue
        error = launched(
            job.arm.recipe,
            [*job.arm.overrides, *job.settings],
            job.folder,
            look=lambda job=job: watcher.reached(job, job.step),
        )
        watcher.ended(job, time.monotonic() - begun, error)
        if error:
            failures[job.arm.name, job.repeat] = error
    return failures
