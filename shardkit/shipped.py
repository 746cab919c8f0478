"""Finds the data folders that come with shardkit: backends/, devices/, launch/ and recipes/."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["backends", "devices", "launch", "recipes"]


def folder(kind: Kind) -> Path:
    """Where a data folder is: in the wheel's `_data`, else beside the package, as in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_data" / kind
    return installed if installed.is_dir() else package.parent / kind


def files(kind: Kind) -> dict[str, Path]:
    """The YAML files of a data folder by name: `zero2` -> .../backends/zero2.yaml."""
    return {path.stem: path for path in sorted(folder(kind).glob("*.yaml"), key=lambda path: path.stem)}


def shown(kind: Kind, name: str) -> str:
    """How a shipped file is called in messages, wherever it is installed."""
    return f"{kind}/{name}.yaml"
