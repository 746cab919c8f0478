"""What was measured on this machine, kept for later plans: a ratio a choice for each model, and the device itself.

The folder is $SHARDKIT_CACHE, else $XDG_CACHE_HOME/shardkit, else ~/.cache/shardkit.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from shardkit.planning.amount import listed
from shardkit.planning.device import Device
from shardkit.planning.measurement import Measurement
from shardkit.planning.plan import BLOCKS
from shardkit.recipe.load import Loaded


def folder() -> Path:
    """Where measurements are kept."""
    own, common = os.environ.get("SHARDKIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(common) if common else Path.home() / ".cache") / "shardkit"


def device_file() -> Path:
    """The device that was measured here."""
    return folder() / "measured.yaml"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is known of one model from measurements."""

    ratios: Mapping[str, float]
    # Name of a choice -> measured over predicted peak; the highest of its numbers of ranks.
    dates: tuple[str, ...] = ()

    @property
    def applied(self) -> dict[str, float]:
        """Also of choices with recomputed blocks, which without a ratio of their own have that of the same without.

        What a prediction misses is much the same in both, and a choice that is corrected looks dearer beside one that
        is not.
        """
        recomputed = {f"{name}, activation_checkpointing={BLOCKS}": ratio for name, ratio in self.ratios.items()}
        return {**recomputed, **self.ratios}

    @property
    def says(self) -> str:
        """The sentence for the reader of a plan."""
        if not self.ratios:
            return ""
        said = [f"{name.replace(', ', ' with ', 1)} x {ratio:.3f}" for name, ratio in self.ratios.items()]
        when = " to ".join(dict.fromkeys((min(self.dates), max(self.dates)))) if self.dates else "an unknown date"
        return (
            f"Peaks are corrected by what was measured on this model on {when}: {listed(said)} "
            "(with recomputed blocks too, where those were not measured); "
            "--no-correction leaves it out."
        )


def key_of(loaded: Loaded, kind: str) -> str:
    """A hash of what decides a model's memory, on a kind of device ("cuda" or "cpu")."""
    recipe = loaded.recipe
    deciding = {
        "model": recipe.model,
        "loss": recipe.loss,
        "normalization": asdict(recipe.normalization),
        "blocks": recipe.blocks,
        "activation_checkpointing": recipe.activation_checkpointing,
        "precision": recipe.train.precision,
        "optimizer": recipe.optimizer,
        "data": recipe.data.train,
        "device": kind,
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True, default=str).encode()).hexdigest()[:16]


def recall(loaded: Loaded, kind: str) -> Kept:
    """What earlier measurements of this model say; a file that cannot be read says nothing."""
    entries = _entries(_file(loaded, kind))
    ratios: dict[str, float] = {}
    for entry in entries.values():
        ratios[entry["name"]] = max(entry["ratio"], ratios.get(entry["name"], 0.0))
    return Kept(ratios=ratios, dates=tuple(sorted({entry["date"] for entry in entries.values()})))


def keep(loaded: Loaded, kind: str, measured: Sequence[Measurement]) -> Path:
    """Write down the ratios, each in place of an earlier one of the same choice and number of ranks."""
    import torch

    import shardkit

    path = _file(loaded, kind)
    entries = _entries(path)
    for each in measured:
        if each.ratio is None or each.error:
            continue
        choice = each.row.choice
        entries[f"{choice.name} @ {choice.world_size}"] = {
            "name": choice.name,
            "world_size": choice.world_size,
            "ratio": each.ratio,
            "predicted_peak_bytes": each.predicted("peak"),
            "measured_peak_bytes": each.parts["peak"],
            "micro_batch_size": each.row.micro_batch_size,
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"shardkit": shardkit.__version__, "torch": torch.__version__},
        }
    facts = {"recipe": loaded.recipe.name, "device": kind, "choices": entries}
    _write(path, json.dumps(facts, indent=1) + "\n")
    return path


def keep_device(device: Device) -> Path:
    """Write the measured device so that `--device measured` finds it."""
    values = {key: value for key, value in asdict(device).items() if key != "measured"}
    values["flops"] = dict(device.flops)
    head = f"# Measured by shardkit plan --measure, {time.strftime('%Y-%m-%d')}; see devices/README.md.\n"
    path = device_file()
    _write(path, head + yaml.safe_dump(values, sort_keys=False))
    return path


def _file(loaded: Loaded, kind: str) -> Path:
    return folder() / "plans" / f"{key_of(loaded, kind)}.json"


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["choices"]
        return {key: entry for key, entry in found.items() if entry["ratio"] > 0 and entry["name"] and entry["date"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(path: Path, text: str) -> None:
    """Whole or not at all: another plan may read it now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
