"""A launch as a process of its own: started, watched while it runs, and asked how it ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

POLL = 0.3
# Seconds between looks at how far a job has come.
STOPPED = 75
# Exit code of a run that stopped where it was asked to.


def launched(recipe: str, words: Sequence[str], folder: Path, look: Callable[[], None] | None = None) -> str:
    """Run a recipe to its end in a folder, its output in a file beside it; why it failed, or nothing.

    A Ctrl-C reaches the job too, and ends both.

    Args:
        recipe: its path.
        words: `key=value`, over the recipe's.
        folder: of the run.
        look: called again and again while it runs.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.parent / f"{folder.name}.log"
    # What is there is kept: a launch before may be gone on with.
    with output.open("a", encoding="utf-8") as log:
        before = log.tell()
        started = subprocess.Popen(
            [sys.executable, "-m", "shardkit.launch", recipe, *words, f"run_dir={folder}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                try:
                    code = started.wait(POLL)
                    break
                except subprocess.TimeoutExpired:
                    if look is not None:
                        look()
        except BaseException:
            # It ends its ranks by itself; a terminal's Ctrl-C has reached it already, and a second does no harm.
            started.send_signal(signal.SIGINT)
            started.wait()
            raise
    if look is not None:
        look()
    if code in (0, STOPPED) and status(folder) == "completed":
        return ""
    lines = output.read_bytes()[before:].decode(errors="replace").strip().splitlines()
    said = next((line for line in reversed(lines) if line.startswith("shardkit:") and "logs of" not in line), "")
    ended = metrics_lines(folder)[-1:]
    return (ended[0].get("error") if ended else None) or said or (lines[-1] if lines else f"exit code {code}")


def status(folder: Path) -> str:
    """completed (also where it stopped as asked), failed, or "" of a run that has not ended."""
    lines = metrics_lines(folder)
    last = lines[-1] if lines else {}
    if last.get("kind") != "end":
        return ""
    whole = last.get("status") == "completed" or (last.get("status") == "stopped" and last.get("resumable") is True)
    return "completed" if whole else str(last.get("status"))


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are whole; none where there is none yet."""
    found = []
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # being written
    return found
