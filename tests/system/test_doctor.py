"""`shardkit doctor` as a user calls it: on the recipes that come with shardkit, and with mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.launches import Ended, environment, finish


def doctor(folder: Path, *arguments: str, **more: str) -> Ended:
    command = [sys.executable, "-c", "from shardkit.cli import main; main()", "doctor", *arguments]
    given = environment(OMP_NUM_THREADS="1", **more)
    process = subprocess.Popen(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return finish(process, time.monotonic())


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    return doctor(folder, "digits-resnet", "batch.micro_batch_size=4", "--output", "found"), folder


def test_the_drifting_layers_of_the_digits_recipe_are_named(digits: tuple[Ended, Path]) -> None:
    ended, folder = digits
    assert ended.code == 0, ended.err
    assert {path.name for path in folder.iterdir()} == {"found"}  # no run was started
    found = json.loads((folder / "found" / "doctor.json").read_text())
    assert (found["accumulation"], found["world_size"], found["items"]) == (12, 2, 96)
    assert len(found["layers"]) == 9 and found["layers"][0]["verdict"] == "badly"
    assert found["recommended"]["policy"] == "exact" and found["recommended"]["remaining"] < 0.01
    assert "  policy: exact" in ended.out and found["layers"][0]["name"] in found["verdict"]
    assert {flat["policy"]: flat["verdict"] for flat in found["memory"]}["keep"] == "flat"


def test_a_piped_report_is_plain_and_is_written_too(digits: tuple[Ended, Path]) -> None:
    ended, folder = digits
    assert ended.out.isascii() and "\x1b" not in ended.out
    assert (folder / "found" / "doctor.txt").read_text() == ended.out
    assert "wrote found/doctor.json" in ended.err


def test_exact_has_no_drift_on_the_digits_recipe(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    recipe = ["digits-resnet", "batch.micro_batch_size=4", "normalization.policy=exact"]
    ended = doctor(tmp_path, *recipe, "--json", "deep/found.json")
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert len(found["layers"]) == 9 and {layer["verdict"] for layer in found["layers"]} == {"ok"}
    assert all(layer["severity"] == 0.0 for layer in found["layers"])
    assert found["verdict"].startswith("No layer drifts under exact") and found["recommended"]["policy"] == "exact"


def test_a_model_without_batch_norm_needs_nothing(project: Path) -> None:
    ended = doctor(project, "toy.yaml")
    assert ended.code == 0, ended.err
    assert "No BatchNorm in this model" in ended.out and "nothing to do" in ended.out


def test_mistakes_are_told_as_a_launch_tells_them_without_torch(project: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    ended = doctor(project, "toy.yaml", "train.max_stepps=3", "batch.micro_batch_size=x", PYTHONPATH=str(tmp_path))
    assert ended.code == 2 and len(ended.err.splitlines()) == 2
    ended = doctor(project, "toy.yaml", "model.in_feature=3")
    assert ended.code == 2 and "in_features" in ended.err


def test_a_place_that_cannot_be_written_is_told_first(project: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    ended = doctor(project, "toy.yaml", "--json", "toy.py/found.json", PYTHONPATH=str(tmp_path))
    assert ended.code == 2 and "toy.py/found.json" in ended.err
    ended = doctor(project, "toy.yaml", "--json", ".", PYTHONPATH=str(tmp_path))
    assert ended.code == 2 and "is a folder" in ended.err
