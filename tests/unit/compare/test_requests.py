"""What cannot be compared, checked or listed is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardkit.cli import app
from tests.system.launches import make_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_project(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    (tmp_path / "no-run").mkdir()
    return tmp_path


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2, (words, done.output)
    assert not Path("runs").exists()
    return done.stderr


TWO = ("toy.yaml", "--backends", "ddp,fsdp2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("toy.yaml",), "there is nothing to compare with"),
        (("toy.yaml", "--backends", "ddp,ddp"), "two arms are named ddp"),
        (("toy.yaml", "--backends", "ddp,zero7"), "arm zero7: command line 'backend=zero7'"),
        (("toy.yaml", "--backends", "ddp", "--arm", "nonsense"), "is no arm; expected 'NAME: key=value key=value'"),
        ((*TWO, "--repeats", "0"), "--repeats 0 compares nothing"),
        ((*TWO, "run_dir=here"), "run_dir is not for shardkit compare: --output names"),
        ((*TWO, "--output", "toy.yaml"), "--output 'toy.yaml' cannot be made a folder"),
        ((*TWO, "--output", "toy.yaml/out"), "--output 'toy.yaml/out' cannot be made a folder"),
        (("no-run", "no-run"), "'no-run' holds no run: there is no metrics.jsonl in it"),
        (("no-run", "no-run", "--steps", "3", "--vs", "x"), "--vs, --steps: not for a compare of runs that ended"),
    ],
)
def test_what_cannot_be_compared(project: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused("compare", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world-sizes", "two"), "--world-sizes 'two' is no list"),
        (("--world-sizes", "2,64"), "cannot be cut into two micro-batches on each of 64 processes"),
        (("launch.nproc_per_node=2",), "launch.nproc_per_node is not for shardkit check: --world-sizes says it"),
        (("train.stop_at_step=2",), "train.stop_at_step is not for shardkit check"),
        (("--backends", "single", "--world-sizes", "2"), "single-2: "),
        (("--backends", "ddp,zero2", "backend.options.bucket_cap_mb=3"), "zero2-1: command line "),
        (("--backends", "ddp", "backend.options.bucket_cap=3"), "did you mean 'bucket_cap_mb'"),
        (("loss._target_=toy.nothing",), "command line 'loss._target_=toy.nothing': loss._target_: "),
    ],
)
def test_what_cannot_be_checked(project: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused("check", "toy.yaml", *words)


def test_runs_are_looked_for_in_a_folder(project: Path) -> None:
    assert "'nope' is no folder" in refused("runs", "nope")
    assert "no run in runs" in CliRunner().invoke(app, ["runs"]).stdout
