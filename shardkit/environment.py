"""environment.json: what a run ran on. The launcher writes the machine, rank 0 adds the world."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkit.engines import registry
from shardkit.run_folder import RunFolder

if TYPE_CHECKING:
    from shardkit.world import World

OWN = ("torch", "numpy", "omegaconf", "scikit-learn", "tensorboard")
# And what the adapters need.
PACKAGES = (*OWN, *sorted({name for adapter in registry.BUILT_IN.values() for name in adapter.needs}))


def write_machine(folder: RunFolder, command: Sequence[str]) -> None:
    """Write versions, processors, commit and command line.

    Raises:
        RecipeError: the run folder does not take it, as when its disk is full.
    """
    from shardkit import __version__

    commit = _git("rev-parse", "HEAD")
    facts = {
        "shardkit": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "git_commit": commit,
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None,
        "command": shlex.join(command),
        "working_directory": os.getcwd(),  # noqa: PTH109
    }
    with folder.told("write to"):
        _write(folder, facts)


def add_world(folder: RunFolder, world: World) -> None:
    """Add what only a rank knows: the world, its devices and threads."""
    import torch

    cuda = world.device.type == "cuda"
    known = json.loads(folder.environment.read_text(encoding="utf-8")) if folder.environment.exists() else {}
    known |= {
        "world_size": world.size,
        "device_type": world.device.type,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda if cuda else None,
        "threads_per_rank": torch.get_num_threads(),
    }
    _write(folder, known)


def command_line() -> list[str]:
    """This process's command line as it was typed."""
    return sys.orig_argv


def _write(folder: RunFolder, facts: dict[str, Any]) -> None:
    folder.environment.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
