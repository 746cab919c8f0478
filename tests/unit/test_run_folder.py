"""A run folder holds one run, which further attempts go on with and lose nothing of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit import run_folder
from shardkit.errors import RecipeError
from shardkit.run_folder import RunFolder


def choose(path: Path, resume: str = "auto") -> RunFolder:
    return run_folder.choose("toy", str(path), resume=resume, place="toy.yaml:3:1")


def refusal(path: Path, resume: str = "auto") -> str:
    with pytest.raises(RecipeError) as caught:
        choose(path, resume)
    return str(caught.value)


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with an attempt of a run in it, which has ended."""
    folder = RunFolder(tmp_path / "run")
    folder.create("seed: 1\n")
    folder.environment.write_text("{}")
    folder.log(0).write_text("first attempt\n")
    folder.metrics.write_text('{"kind": "train", "step": 1}\n{"kind": "end", "status": "stopped", "steps": 1}\n')
    folder.checkpoints.mkdir()
    return folder.path


def test_a_new_run_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (run_folder.choose("toy", None, resume="auto") for _ in range(2))
    assert first.path != second.path and first.path.parent == Path("runs/toy")
    assert not first.goes_on and not first.path.exists()
    first.open("seed: 1\n")
    assert first.holds_run and first.logs.is_dir()
    assert first.checkpoints == first.path / "checkpoints" and not first.checkpoints.exists()


@pytest.mark.parametrize("resume", ["auto", "runs/other/checkpoints"])
def test_a_run_goes_on_in_its_folder_and_loses_nothing(used: Path, resume: str) -> None:
    folder = choose(used, resume)
    assert folder.goes_on
    folder.open("seed: 2\n")
    assert folder.recipe.read_text() == "seed: 2\n"
    assert (used / "recipe.1.yaml").read_text() == "seed: 1\n"
    assert (used / "environment.1.json").exists() and not folder.environment.exists()
    assert folder.log(0).read_text() == "first attempt\n" and folder.checkpoints.is_dir()
    kinds = [json.loads(line)["kind"] for line in folder.metrics.read_text().splitlines()]
    assert kinds == ["train", "end", "reopen"]


def test_each_attempt_keeps_the_one_before_under_one_number(used: Path) -> None:
    for attempt, recipe in enumerate(["seed: 1\n", "seed: 2\n", "seed: 3\n"]):
        folder = choose(used)
        folder.reopen(recipe)
        folder.environment.write_text(json.dumps({"attempt": attempt}))
    assert {path.name: path.read_text() for path in used.glob("recipe.*yaml")} == {
        "recipe.yaml": "seed: 3\n",
        "recipe.2.yaml": "seed: 1\n",
        "recipe.3.yaml": "seed: 2\n",
    }
    assert {path.name for path in used.glob("environment.*json")} == {
        "environment.json",
        "environment.1.json",
        "environment.2.json",
        "environment.3.json",
    }


def test_an_attempt_that_ended_before_its_logs_can_be_taken_up(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    folder = choose(tmp_path)
    folder.open("seed: 1\n")
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "logs"}


def test_never_refuses_a_run_and_says_how_to_go_on(used: Path) -> None:
    assert refusal(used, "never") == (
        f"toy.yaml:3:1: run_dir: {str(used)!r} holds a run, and checkpoint.resume is never; give a new folder, remove "
        "this one first, or go on with its run by checkpoint.resume=auto"
    )


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_of_something_else_is_refused_always(tmp_path: Path, resume: str) -> None:
    (tmp_path / "thesis.tex").write_text("of years")
    assert refusal(tmp_path, resume) == (
        f"toy.yaml:3:1: run_dir: {str(tmp_path)!r} is not empty, and holds no run (no recipe.yaml) to go on with; "
        "give a new folder, or remove this one first"
    )
    assert "is a file; expected a new or an empty folder" in refusal(tmp_path / "thesis.tex", resume)


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    folder = choose(tmp_path)
    folder.open("seed: 1\n")
    assert folder.holds_run


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
def test_a_path_no_system_takes_is_a_problem_of_run_dir(path: str) -> None:
    assert refusal(Path(path)).startswith("toy.yaml:3:1: run_dir: cannot use ")


def test_of_two_launches_that_chose_a_new_folder_one_gets_it(tmp_path: Path) -> None:
    first, second = choose(tmp_path / "run"), choose(tmp_path / "run")
    first.create("seed: 1\n")
    with pytest.raises(RecipeError, match="run_dir: "):
        second.open("seed: 2\n")
    assert first.recipe.read_text() == "seed: 1\n"


HOLD = """
import sys
from pathlib import Path
from shardkit.run_folder import RunFolder
RunFolder(Path(sys.argv[1]), goes_on=True).open("seed: 1\\n")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_at_work_is_not_taken_up_by_another_launch(used: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(used)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    before = {path: path.stat().st_mtime_ns for path in used.iterdir()}
    with pytest.raises(RecipeError) as caught:
        choose(used).open("seed: 2\n")
    assert str(caught.value) == (
        f"toy.yaml:3:1: run_dir: another launch is at work in {str(used)!r}; wait for its end, stop it, or give a new "
        "folder"
    )
    assert {path: path.stat().st_mtime_ns for path in used.iterdir()} == before
    other.kill()
    other.communicate()
    choose(used).open("seed: 2\n")
