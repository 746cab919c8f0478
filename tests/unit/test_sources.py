"""What a run starts from is looked for before any process starts; what is not there is told with what is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.engines.registry import options_of
from shardkit.launch.sources import check_sources
from shardkit.recipe.load import load
from tests.unit.recipe.conftest import SOUND


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a run that has two checkpoints, weights in two forms, and something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(SOUND)
    for step in ("step-00000002", "step-00000010"):
        (tmp_path / "runs/first/checkpoints" / step).mkdir(parents=True)
        (tmp_path / "runs/first/checkpoints" / step / "manifest.json").touch()
    for file in ("bert/model.safetensors", "old/pytorch_model.bin", "notes/today.txt", "weights.safetensors"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    return tmp_path


def said(key: str, path: str) -> str:
    """The one problem of a path, or nothing; its place and key are those of the setting."""
    problems = list(check_sources(load("recipe.yaml", [f"{key}={path}"], options_of=options_of)))
    assert all((p.key, p.place) == (key, f"command line '{key}={path}'") for p in problems) and len(problems) < 2
    return problems[0].message if problems else ""


CHECKPOINT = ["runs/first/checkpoints", "runs/first/checkpoints/", "runs/first/checkpoints/step-00000010"]


@pytest.mark.parametrize("path", ["auto", "never", "memory://bucket/run/checkpoints", *CHECKPOINT])
def test_a_run_goes_on_from_a_checkpoint_or_a_folder_of_them(path: str) -> None:
    assert said("checkpoint.resume", path) == ""


@pytest.mark.parametrize(
    "path", ["null", "memory://bert/model.safetensors", "weights.safetensors", "bert", *CHECKPOINT]
)
def test_weights_come_from_a_checkpoint_a_file_or_a_folder(path: str) -> None:
    assert said("init_from", path) == ""


@pytest.mark.parametrize("key", ["checkpoint.resume", "init_from"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "runs/first/checkpoint/step-00000010",
            "'runs/first/checkpoint/step-00000010' does not exist; in 'runs/first' there is checkpoints; did you mean "
            "'runs/first/checkpoints'?",
        ),
        (
            "runs/first/checkpoints/step-00000001",
            "'runs/first/checkpoints/step-00000001' does not exist; in 'runs/first/checkpoints' there is "
            "step-00000002, step-00000010",
        ),
        (
            "zzz/checkpoints",
            "'zzz/checkpoints' does not exist; in the working directory there is bert, notes, old, recipe.yaml, runs, "
            "weights.safetensors",
        ),
        ("notes/today.txt/x", "'notes/today.txt/x' does not exist: 'notes/today.txt' is a file"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(key: str, path: str, message: str) -> None:
    assert said(key, path) == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nevr", "'nevr' is neither auto nor never, and no such path exists; did you mean 'never'?"),
        (
            "runs/first",
            "'runs/first' holds no checkpoint: there is no manifest.json in it or in a step-* folder of it; did you "
            "mean 'runs/first/checkpoints'?",
        ),
        (
            "notes",
            "'notes' holds no checkpoint: there is no manifest.json in it or in a step-* folder of it; there is "
            "today.txt",
        ),
        (
            "weights.safetensors",
            "'weights.safetensors' is a file; expected a checkpoint, which is a folder with manifest.json, or a folder "
            "of them",
        ),
    ],
)
def test_what_is_nothing_to_resume_from_says_why(path: str, message: str) -> None:
    assert said("checkpoint.resume", path) == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "old",
            "'old' holds no checkpoint: there is no manifest.json in it or in a step-* folder of it, and no weights "
            "(*.safetensors); pytorch_model.bin is a pickle, which is not read: save it as safetensors; there is "
            "pytorch_model.bin",
        ),
        (
            "old/pytorch_model.bin",
            "'old/pytorch_model.bin' is no .safetensors file; expected a checkpoint, a .safetensors file, or a Hugging "
            "Face folder",
        ),
    ],
)
def test_what_holds_no_weights_says_why(path: str, message: str) -> None:
    assert said("init_from", path) == message


def test_a_home_that_no_shell_has_expanded_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    path = str(project / "weights.safetensors")
    assert said("init_from", "~/weights.safetensors") == (
        f"'~/weights.safetensors' does not exist: ~ is not expanded here; write {path!r}"
    )


def test_a_path_that_no_system_takes_is_a_problem_too() -> None:
    assert said("checkpoint.resume", "x" * 300) == f"cannot read {'x' * 300!r}: File name too long"


def test_a_full_folder_is_not_listed_whole(project: Path) -> None:
    for number in range(30):
        (project / "notes" / f"{number:02}.txt").touch()
    assert said("checkpoint.resume", "notes/zzz").endswith("05.txt, 06.txt, 07.txt and 23 more")


def test_both_are_told_at_once() -> None:
    loaded = load("recipe.yaml", ["checkpoint.resume=a/b", "init_from=a/c"], options_of=options_of)
    assert [problem.key for problem in check_sources(loaded)] == ["checkpoint.resume", "init_from"]


@pytest.mark.parametrize("key", ["checkpoint.resume", "checkpoint.folder", "init_from"])
def test_a_url_that_nothing_here_opens_is_refused_before_anything_starts(key: str) -> None:
    assert said(key, "memory://bucket/runs") == ""
    assert said(key, "nosuch://bucket/runs").startswith("'nosuch://bucket/runs' cannot be opened: ")


def test_a_folder_that_no_checkpoint_can_be_written_into_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said("checkpoint.folder", "kept/here") == said("checkpoint.folder", "notes") == ""
    assert said("checkpoint.folder", "weights.safetensors/kept") == (
        f"'weights.safetensors/kept' cannot be a folder: {project / 'weights.safetensors'} is a file; name another"
    )
    # Root may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert said("checkpoint.folder", "notes/kept").startswith("'notes/kept' cannot be written to: ")
