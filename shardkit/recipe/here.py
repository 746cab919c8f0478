"""Targets may be modules of the working directory, however the process was started."""

from __future__ import annotations

import sys
from pathlib import Path


def import_from_here() -> None:
    """Let the working directory be imported from, as Python does for `-m` and not for a console command."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
