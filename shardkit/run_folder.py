"""The run folder: where a run's recipe, metrics, checkpoints and logs are, and how it comes to be or goes on."""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit import metrics
from shardkit.errors import Problem, RecipeError


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>/<run_id>/`, or the folder that `run_dir` names."""

    path: Path
    place: str = ""
    # Where the recipe or the command line names it.
    goes_on: bool = False
    # There is a run in it, which another attempt takes up again.

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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

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

    @property
    def holds_run(self) -> bool:
        """Whether there is a run here, to go on with."""
        return self.recipe.is_file()

    def open(self, recipe: str) -> None:
        """Make the folder of a new run, or take up the run in it; no other process of this machine may do so now.

        Raises:
            RecipeError: it cannot be made or written to, or another launch is at work in it.
        """
        if self.goes_on:
            self._claim()
            self.reopen(recipe)
        else:
            self.create(recipe)
            self._claim()

    def create(self, recipe: str) -> None:
        """Make the folder, with the resolved recipe and a place for logs.

        Raises:
            RecipeError: it holds something already, or cannot be made.
        """
        with self.told("use"):
            if self.holds_run:
                raise self._problem(f"another launch has begun a run in {str(self.path)!r} in the meantime")
        self.refuse_used()
        with self.told("make"):
            self.path.mkdir(parents=True, exist_ok=True)
            # The recipe first, and never over another: with it the folder holds a run, whatever happens now.
            with self.recipe.open("x", encoding="utf-8") as file:
                file.write(recipe)
            self.logs.mkdir()

    def reopen(self, recipe: str) -> None:
        """Let another attempt go on in this folder; logs and metrics are added to.

        What earlier attempts ran is kept beside what this one runs: recipe.1.yaml, where the recipe has changed, and
        environment.1.json, then .2 and so on.

        Raises:
            RecipeError: it cannot be written to.
        """
        with self.told("go on in"):
            number = next(n for n in itertools.count(1) if not any(path.exists() for path in self._kept(n)))
            earlier_recipe, earlier_environment = self._kept(number)
            if self.recipe.read_text(encoding="utf-8", errors="replace") != recipe:
                shutil.copyfile(self.recipe, earlier_recipe)
                _replace(self.recipe, recipe)
            if self.environment.exists():
                self.environment.rename(earlier_environment)
            self.logs.mkdir(exist_ok=True)
            metrics.reopen(self.metrics)

    def _claim(self) -> None:
        """Hold a lock on the folder until this process ends; without one where the file system has none."""
        with self.told("open"):
            folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise self._problem(
                f"another launch is at work in {str(self.path)!r}; wait for its end, stop it, or give a new folder"
            ) from None
        except OSError:
            os.close(folder)

    def _kept(self, number: int) -> tuple[Path, Path]:
        """Where the recipe and the environment of an earlier attempt are kept."""
        return self.path / f"recipe.{number}.yaml", self.path / f"environment.{number}.json"

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
            if not self.path.is_dir():
                raise self._problem(f"{str(self.path)!r} is a file; expected a new or an empty folder")
            if self.holds_run:
                raise self._problem(
                    f"{str(self.path)!r} holds a run, and checkpoint.resume is never; "
                    "give a new folder, remove this one first, or go on with its run by checkpoint.resume=auto"
                )
            if any(self.path.iterdir()):
                raise self._problem(
                    f"{str(self.path)!r} is not empty, and holds no run (no recipe.yaml) to go on with; "
                    "give a new folder, or remove this one first"
                )

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


def choose(name: str, run_dir: str | None, *, resume: str = "never", place: str = "") -> RunFolder:
    """The folder of a run, new or, unless `resume` is never, of one to go on with; nothing is made yet.

    Raises:
        RecipeError: `run_dir` holds something else already, or cannot be a folder.
    """
    if run_dir is None:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return RunFolder(Path("runs") / name / run_id, place)
    folder = RunFolder(Path(run_dir), place)
    with folder.told("use"):
        if resume != "never" and folder.holds_run:
            return replace(folder, goes_on=True)
    folder.refuse_used()
    return folder


def is_held(path: Path) -> bool:
    """Whether a launch holds the folder's lock on this machine."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _replace(path: Path, text: str) -> None:
    """Write a file over another so that one of the two is there at any moment."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
