"""A user's project, made once for the launches of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.launches import make_project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))
