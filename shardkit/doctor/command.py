"""The command `shardkit doctor`: check a recipe as a launch does, examine it, and write what was found.

The first pass does not import torch, so that a typo answers at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.engines import registry
from shardkit.errors import RequestError, ShardkitError
from shardkit.recipe.here import import_from_here
from shardkit.recipe.load import load

if TYPE_CHECKING:
    from shardkit.doctor.diagnosis import Diagnosis
    from shardkit.recipe.load import Loaded


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where to write what was found; None = nowhere."""

    json: Path | None = None
    plot: Path | None = None
    text: Path | None = None

    @classmethod
    def asked(cls, *, json: Path | None, plot: Path | None, folder: Path | None) -> Files:
        """Those of the command line: a folder holds all three, the picture where matplotlib is installed."""
        if folder is None:
            return cls(json=json, plot=plot)
        drawn = folder / "doctor.png" if importlib.util.find_spec("matplotlib") is not None else None
        return cls(json=json or folder / "doctor.json", plot=plot or drawn, text=folder / "doctor.txt")

    def check(self) -> None:
        """Pass what can be written: it would be a pity to find out after the measurements.

        Raises:
            RequestError: a place is taken by something else, or matplotlib is not installed.
        """
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise RequestError("--plot needs matplotlib, which is not installed. pip install 'shardkit[plots]'")
        for path in self.all():
            if path.is_dir():
                raise RequestError(f"{str(path)!r} is a folder; expected a file to write")
            above = next(parent for parent in path.absolute().parents if parent.exists())
            if not (above.is_dir() and os.access(above, os.W_OK)):
                raise RequestError(f"{str(path)!r} cannot be written: {str(above)!r} is no folder that takes files")

    def all(self) -> list[Path]:
        return [path for path in (self.json, self.plot, self.text) if path is not None]


def doctor(recipe: str, overrides: Sequence[str], files: Files) -> int:
    """Examine a recipe; the exit code: 0, 2 for a wrong recipe or request, 1 for a batch that cannot be examined."""
    try:
        import_from_here()
        loaded = load(recipe, overrides, options_of=registry.options_of)
        files.check()
        _write(loaded, _examine(loaded), files)
    except ShardkitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _examine(loaded: Loaded) -> Diagnosis:
    from shardkit.launch import preflight

    found = preflight.check(loaded)
    from shardkit.doctor.diagnosis import diagnose
    from shardkit.doctor.subject import prepare
    from shardkit.world import resolve_device

    device = resolve_device(loaded.recipe.launch.device, 0)
    return diagnose(prepare(loaded.recipe, world_size=found.world_size, device=device))


def _write(loaded: Loaded, diagnosis: Diagnosis, files: Files) -> None:
    from shardkit.doctor.report import as_text, open_console, show

    show(diagnosis, open_console())
    for path in files.all():
        path.parent.mkdir(parents=True, exist_ok=True)
    if files.json is not None:
        sizes = {"recipe": loaded.path, "global_batch_size": loaded.recipe.batch.global_batch_size}
        text = json.dumps({**sizes, **diagnosis.to_json()}, indent=2)
        files.json.write_text(text + "\n", encoding="utf-8")
    if files.text is not None:
        files.text.write_text(as_text(diagnosis), encoding="utf-8")
    if files.plot is not None:
        from shardkit.doctor.plot import plot

        plot(diagnosis, files.plot)
    for path in files.all():
        print(f"shardkit: wrote {path}", file=sys.stderr)
