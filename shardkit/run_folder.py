"""The run folder: where a run's recipe, metrics and logs are, and how it comes to be."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import RequestError


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>/<run_id>/`, or the folder that `run_dir` names."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def normalization(self) -> Path:
        return self.path / "normalization.txt"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.logs / f"rank-{rank}.log"

    def create(self, recipe: str) -> None:
        """Make the folder, with the resolved recipe and a place for logs.

        Raises:
            RequestError: it holds something already, or cannot be made.
        """
        refuse_used(self.path)
        try:
            self.logs.mkdir(parents=True)
            self.recipe.write_text(recipe, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"run_dir: cannot make {str(self.path)!r}: {error.strerror}") from error


def choose(name: str, run_dir: str | None) -> RunFolder:
    """The folder of a new run; nothing is made yet.

    Raises:
        RequestError: `run_dir` holds something already.
    """
    if run_dir is None:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return RunFolder(Path("runs") / name / run_id)
    path = Path(run_dir)
    refuse_used(path)
    return RunFolder(path)


def refuse_used(path: Path) -> None:
    """Pass an absent or an empty folder only: a run never writes over another.

    Raises:
        RequestError: there is something at `path`.
    """
    if path.is_dir() and any(path.iterdir()):
        raise RequestError(
            f"run_dir: {str(path)!r} is not empty, and a run folder holds one run; "
            "give a new folder, or remove this one first"
        )
    if path.exists() and not path.is_dir():
        raise RequestError(f"run_dir: {str(path)!r} is a file; expected a new or an empty folder")
