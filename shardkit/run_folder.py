"""The run folder: where a run's recipe, metrics and logs are, and how it comes to be."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import Problem, RecipeError


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>/<run_id>/`, or the folder that `run_dir` names."""

    path: Path
    place: str = ""
    # Where the recipe or the command line names it.

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
            RecipeError: it holds something already, or cannot be made.
        """
        self.refuse_used()
        with self.told("make"):
            self.logs.mkdir(parents=True)
            self.recipe.write_text(recipe, encoding="utf-8")

    def refuse_used(self) -> None:
        """Pass an absent or an empty folder only: a run never writes over another.

        Raises:
            RecipeError: there is something at the path, or there can be nothing.
        """
        with self.told("use"):
            try:
                self.path.lstat()  # is_dir() takes any path that no system takes for one that is not there
            except FileNotFoundError:
                return
            if self.path.is_dir() and any(self.path.iterdir()):
                raise self._problem(
                    f"{str(self.path)!r} is not empty, and a run folder holds one run; "
                    "give a new folder, or remove this one first"
                )
            if not self.path.is_dir():
                raise self._problem(f"{str(self.path)!r} is a file; expected a new or an empty folder")

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Turn what the system refuses into a problem of `run_dir`.

        Raises:
            RecipeError: the block raised an OSError, or a path that no system takes.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or error
            raise self._problem(f"cannot {what} {str(self.path)!r}: {why}") from error

    def _problem(self, message: str) -> RecipeError:
        return RecipeError([Problem(place=self.place, key="run_dir", message=message)])


def choose(name: str, run_dir: str | None, *, place: str = "") -> RunFolder:
    """The folder of a new run; nothing is made yet.

    Raises:
        RecipeError: `run_dir` holds something already, or cannot be a folder.
    """
    if run_dir is None:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return RunFolder(Path("runs") / name / run_id, place)
    folder = RunFolder(Path(run_dir), place)
    folder.refuse_used()
    return folder
