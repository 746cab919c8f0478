"""What a run of a choice needed, beside what was predicted: read from its memory.json and metrics.jsonl."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.planning.plan import Row

STATES = ("parameters", "masters", "optimizer", "gradients", "buffers")
PARTS = (*STATES, "activations", "peak", "host")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One choice that was run; bytes are those of its fullest rank."""

    row: Row
    # What was predicted.
    parts: dict[str, int] = field(default_factory=dict)
    # Part -> bytes; PARTS.
    seconds: float | None = None
    # Of a step; None = not measured.
    device: dict[str, Any] = field(default_factory=dict)
    # What the ranks found of their devices.
    error: str = ""
    # Why there is nothing.

    @property
    def ratio(self) -> float | None:
        """Measured over predicted peak, without what earlier measurements correct."""
        footprint, peak = self.row.footprint, self.parts.get("peak", 0)
        return peak / footprint.peak if footprint is not None and footprint.peak and peak else None

    def predicted(self, part: str) -> int | None:
        """Bytes that were predicted of a part; the peak without correction."""
        found = self.row.footprint
        if found is None or (self.row.unknown and part in ("activations", "peak")):
            return None
        if part != "peak" and found.host and self.device.get("kind") == "cpu":
            return None  # what is offloaded is in the same memory, and of no known part
        if part == "activations":
            # What of the peak is no state, as a run counts it.
            return max(0, found.peak - sum(getattr(found, state) for state in STATES))
        return None if part == "host" else getattr(found, part)

    def to_json(self) -> dict[str, Any]:
        known = {f"{part}_bytes": self.parts.get(part) for part in PARTS}
        return {**known, "step_seconds": self.seconds, "ratio": self.ratio, "error": self.error}


def read(row: Row, counted: Path, timed: Path) -> Measurement:
    """What a run folder with memory.json tells, and the step time of one whose memory was not counted.

    Raises:
        OSError: a file is missing.
        ValueError: it is no JSON.
    """
    facts = json.loads((counted / "memory.json").read_text(encoding="utf-8"))
    ranks = facts["ranks"]
    fullest = max(ranks, key=lambda rank: rank["peak_bytes"])
    parts = {part: fullest[f"{part}_bytes"] for part in PARTS if part != "host"}
    # Of equal steps, the one in which no buffer was let go of late.
    late = parts["peak"] - fullest.get("lowest_peak_bytes", parts["peak"])
    parts["peak"] -= late
    parts["activations"] = max(0, parts["activations"] - late)
    parts["host"] = max(rank["host_bytes"] for rank in ranks)
    return Measurement(row=row, parts=parts, seconds=step_seconds(timed), device=facts.get("device") or {})


def step_seconds(folder: Path) -> float | None:
    """The median of the steps after the first, which pays for what is done once."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line["seconds"] for line in lines if line.get("kind") == "train"]
    return statistics.median(found[1:]) if len(found) > 1 else None
