from __future__ import annotations

from pathlib import Path

import pytest

from shardkit import shipped


def test_a_checkout_has_its_data_beside_the_package() -> None:
    root = Path(__file__).parents[2]
    assert shipped.folder("backends") == root / "backends"
    assert "zero2" in shipped.files("backends")
    assert list(shipped.files("launch")) == ["local"]


def test_a_wheel_has_its_data_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "shardkit" / "_data" / "backends"
    installed.mkdir(parents=True)
    (installed / "b.yaml").write_text("")
    (installed / "a-b.yaml").write_text("")
    (installed / "README.md").write_text("")
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "shardkit" / "shipped.py"))
    assert list(shipped.files("backends")) == ["a-b", "b"]
    assert shipped.files("recipes") == {}


def test_a_shipped_file_is_called_the_same_wherever_it_is() -> None:
    assert shipped.shown("backends", "zero2") == "backends/zero2.yaml"
