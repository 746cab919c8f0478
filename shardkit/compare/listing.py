"""`shardkit runs`: the runs in a folder, with how far each has come and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardkit.compare.results import read_recipe, read_run
from shardkit.run_folder import is_held


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One run."""

    folder: str
    status: str
    # completed, failed, stopped, running, or cut off: it was killed.
    step: int
    loss: float | None
    backend: str
    world_size: int | None
    changed: str
    # When its metrics were last written to, local time.
    error: str | None


def find_runs(root: Path) -> list[Listed]:
    """The runs under `root`, the one that was last at work first."""
    found = []
    for recipe in root.rglob("recipe.yaml"):
        # Not the folders of a run: what is in it is its own.
        if (recipe.parent / "logs").is_dir() or (recipe.parent / "metrics.jsonl").is_file():
            found.append((_changed(recipe.parent), _listed(recipe.parent)))
    return [listed for _, listed in sorted(found, key=lambda pair: pair[0], reverse=True)]


def table(runs: Iterable[Listed]) -> str:
    """A line a run."""
    rows = [("folder", "status", "step", "loss", "backend", "ranks", "when")]
    for run in runs:
        loss = "" if run.loss is None else f"{run.loss:.4g}"
        rows.append((run.folder, run.status, str(run.step), loss, run.backend, str(run.world_size or ""), run.changed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def to_json(runs: Iterable[Listed]) -> list[dict[str, Any]]:
    return [asdict(run) for run in runs]


def _listed(folder: Path) -> Listed:
    run = read_run(folder)
    last = run.train[-1] if run.train else {}
    backend = read_recipe(folder / "recipe.yaml").get("backend")
    status = run.status
    if status == "missing":
        status = "running" if is_held(folder) else "cut off"
    return Listed(
        folder=str(folder),
        status=status,
        step=int(last.get("step", 0)),
        loss=last.get("loss"),
        backend=str(backend.get("name", "") if isinstance(backend, dict) else backend or ""),
        world_size=run.environment.get("world_size"),
        changed=time.strftime("%Y-%m-%d %H:%M", time.localtime(_changed(folder))),
        error=run.error if status == "failed" else None,
    )


def _changed(folder: Path) -> float:
    metrics = folder / "metrics.jsonl"
    return (metrics if metrics.exists() else folder).stat().st_mtime
