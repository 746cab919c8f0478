"""metrics.jsonl, one JSON object a line, and TensorBoard when it is asked for; rank 0 writes."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

_TAIL_BYTES = 1 << 16


class Writer(Protocol):
    """Takes the lines of a run."""

    def write(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """metrics.jsonl: each line is there when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(encode(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # what a full disk did not take; `write` has said so
            self._file.close()


class TensorBoard:
    """tensorboard/: each number of a line as a scalar named kind/key, over the steps."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path))

    def write(self, line: Mapping[str, Any]) -> None:
        if "step" not in line:
            return
        for key, value in line.items():
            if key not in {"kind", "step"} and isinstance(value, int | float):
                self._writer.add_scalar(f"{line['kind']}/{key}", value, line["step"])

    def close(self) -> None:
        self._writer.close()


def encode(line: Mapping[str, Any]) -> str:
    """A line as JSON that any reader takes: a number that is not finite becomes null."""
    return json.dumps({key: _finite(value) for key, value in line.items()}, allow_nan=False)


def whole(value: float) -> int | float:
    """A count as an int where it is one."""
    return int(value) if float(value).is_integer() else value


def end(path: Path, *, status: str, error: str) -> None:
    """Close the metrics of a run that did not complete, where no line says yet how it ended.

    A run that failed before its first line has no other.
    """
    if not path.parent.is_dir():
        return
    text = _tail(path) if path.exists() else ""
    lines = [line for line in (_decode(raw) for raw in text.splitlines()) if line]
    if lines and lines[-1].get("kind") == "end":
        return
    steps = next((line["step"] for line in reversed(lines) if "step" in line), 0)
    broken = "" if not text or text.endswith("\n") else "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(broken + encode({"kind": "end", "status": status, "steps": steps, "error": error}) + "\n")


def memory_bytes(device_type: str) -> int:
    """The most memory this rank has used: allocated on its CUDA device, or resident in this process."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _decode(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}  # cut off by a kill
    return found if isinstance(found, dict) else {}


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")
