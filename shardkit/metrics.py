"""metrics.jsonl, one JSON object a line, and TensorBoard when it is asked for; rank 0 writes."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
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
    """tensorboard/: each number of a line as a scalar named kind/key, over the steps.

    A run that goes on after step `resumed_at` makes the steps after it again: what an earlier attempt wrote of them
    is not shown.
    """

    def __init__(self, path: Path, *, resumed_at: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path), purge_step=None if resumed_at is None else resumed_at + 1)

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
    lines = _last_lines(path)
    if lines and lines[-1].get("kind") == "end":
        return
    steps = next((line["step"] for line in reversed(lines) if "step" in line), 0)
    _append(path, {"kind": "end", "status": status, "steps": steps, "error": error})


def reopen(path: Path) -> None:
    """Note that another attempt begins: the last line no longer says how the run ended."""
    if path.exists():
        _append(path, {"kind": "reopen"})


def resume(path: Path, step: int, **more: Any) -> None:
    """Forget the lines of the steps after `step`, which are made again, and say that the run goes on from there.

    Of an earlier attempt the lines up to `step` stay as they are, those without a step go. The file is replaced as a
    whole: a kill in the middle leaves the old one. Open it for writing only afterwards.
    """
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as new:
        new.writelines(_lines_until(path, step))
        new.write(encode({"kind": "resume", "step": step, **more}) + "\n")
        new.flush()
        os.fsync(new.fileno())
    part.replace(path)
    _sync_folder(path.parent)


def set_aside(path: Path) -> Path:
    """Keep the lines of an attempt that left nothing to go on from, in metrics.1.jsonl, then .2 and so on."""
    kept = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return path.rename(next(each for each in kept if not each.exists()))


def is_resumable(path: Path) -> bool:
    """Whether the run stopped early on request, with a checkpoint to go on from: its last line says so."""
    lines = _last_lines(path)
    return bool(lines) and lines[-1].get("status") == "stopped" and lines[-1].get("resumable") is True


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


def _last_lines(path: Path) -> list[dict[str, Any]]:
    text = _tail(path) if path.exists() else ""
    return [line for line in (_decode(raw) for raw in text.splitlines()) if line]


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """The lines about the steps up to `step`, as they were written."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as old:
        for raw in old:
            found = _decode(raw).get("step")
            if isinstance(found, int) and found <= step:
                yield raw.rstrip("\n") + "\n"


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, below what a kill may have cut off."""
    text = _tail(path) if path.exists() else ""
    broken = "" if not text or text.endswith("\n") else "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(broken + encode(line) + "\n")


def _sync_folder(folder: Path) -> None:
    """Let the new name of a file outlast a power failure, where folders can be synced."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")
