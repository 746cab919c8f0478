"""What a comparison compares: runs, arms of equal runs, and the arms beside a reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardkit.compare.tolerance import Tolerance

ENDED = ("completed", "failed", "stopped")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One launched job, as its run folder tells it."""

    folder: Path
    status: str
    # completed, failed, stopped; missing = there is no run, or it never came to an end.
    error: str | None = None
    train: list[dict[str, Any]] = field(default_factory=list)
    # Lines of metrics.jsonl, one a step, in the order of the steps.
    evals: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] | None = None
    # profile.json: memory, communication, checkpoint costs; None = the run was not profiled.
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run the recipe: what is compared. Its runs are repeats of the same job."""

    name: str
    command: str
    # What makes it again, exactly.
    recipe: dict[str, Any]
    # Resolved.
    explanation: dict[str, Any] | None = None
    # Explanation.to_json(): what the recipe comes to on this backend.
    runs: list[Run] = field(default_factory=list)

    @property
    def completed(self) -> list[Run]:
        return [run for run in self.runs if run.status == "completed"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arms, one of them the reference."""

    arms: list[Arm]
    reference: str
    # The name of the arm that others are compared with.
    noise: list[Run] | None = None
    # The reference arm once more: how far it is from itself is the measured noise floor.
    steps: int | None = None
    # Optimizer steps of each run; None = as many as the shortest run has.
    tolerance: Tolerance | None = None
    # None = that of the compute dtype.

    @property
    def reference_arm(self) -> Arm:
        """Raises KeyError when no arm has the reference's name."""
        for arm in self.arms:
            if arm.name == self.reference:
                return arm
        raise KeyError(f"no arm is named {self.reference!r}; there are {', '.join(arm.name for arm in self.arms)}")


def read_run(folder: Path) -> Run:
    """The run in a folder, whatever became of it: what is missing or cut off reads as absent."""
    lines = _lines(folder / "metrics.jsonl")
    ended = lines[-1] if lines and lines[-1].get("kind") == "end" else {}
    status = str(ended.get("status", "missing"))
    return Run(
        folder=folder,
        status=status if status in ENDED else "failed" if ended else "missing",
        error=ended.get("error") if ended else _no_end(folder),
        train=_of_kind(lines, "train"),
        evals=_of_kind(lines, "eval"),
        checkpoints=_of_kind(lines, "checkpoint"),
        profile=_object(folder / "profile.json"),
        environment=_object(folder / "environment.json") or {},
    )


def read_arm(
    name: str,
    folders: Sequence[Path],
    *,
    command: str | None = None,
    recipe: dict[str, Any] | None = None,
    explanation: dict[str, Any] | None = None,
) -> Arm:
    """The arm whose runs are in `folders`; recipe and command are those of its first run when they are not given."""
    runs = [read_run(folder) for folder in folders]
    if recipe is None:
        recipe = next((found for folder in folders if (found := read_recipe(folder / "recipe.yaml"))), {})
    if command is None:
        command = next((str(run.environment["command"]) for run in runs if run.environment.get("command")), "")
    return Arm(name=name, command=command, recipe=recipe, explanation=explanation, runs=runs)


def _no_end(folder: Path) -> str:
    if not (folder / "recipe.yaml").is_file():
        return f"there is no run in {folder}"
    return "the run never came to an end: it was killed, or is still going on"


def _of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The lines of a kind by their steps; of a step that was made twice the last counts."""
    found = {line["step"]: line for line in lines if line.get("kind") == kind and isinstance(line.get("step"), int)}
    return [found[step] for step in sorted(found)]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = (_decode(raw) for raw in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [line for line in found if line]


def _object(path: Path) -> dict[str, Any] | None:
    return (_decode(path.read_text(encoding="utf-8", errors="replace")) or None) if path.is_file() else None


def _decode(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}  # cut off by a kill
    return found if isinstance(found, dict) else {}


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
