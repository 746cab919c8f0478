from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardkit.recipe.here import import_from_here


def test_modules_of_the_working_directory_can_be_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    import_from_here()
    import_from_here()
    assert sys.path.count(str(tmp_path)) == 1
    import only_here  # pyright: ignore[reportMissingImports]

    assert only_here.value == 7
