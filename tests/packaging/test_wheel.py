"""A wheel brings its data along and runs from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # hatchling is in the dev extra: nothing is fetched.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_presets_profiles_and_recipes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("backends", "devices", "launch", "recipes"):
        for path in (ROOT / kind).glob("*.yaml"):
            assert f"shardkit/_data/{kind}/{path.name}" in names
    pages = [path for path in (ROOT / "shardkit").rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert len(pages) >= 6 and {path.relative_to(ROOT).as_posix() for path in pages} <= names
    assert not [name for name in names if name.startswith(("tests/", "backends/", "recipes/"))]


def test_an_installed_shardkit_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "shardkit.launch", "digits-resnet", "backend=zero2", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "zero2" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]
