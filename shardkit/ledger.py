"""memory.json of a run: what each rank's memory was used for, counted while it trained.

{"method", "ranks": [{"rank", "parameters_bytes", "masters_bytes", "gradients_bytes", "optimizer_bytes",
"buffers_bytes", "activations_bytes", "peak_bytes", "lowest_peak_bytes", "loading_bytes", "host_bytes"}], "device"}.
States are those at the last optimizer's step, gradients complete; the peak is that of all steps after the first, which
makes the optimizer's state, and the lowest that of the step among them that needed least: gloo's threads let go of
buffers when they come to it, so that equal steps peak differently. Loading goes from the bare model on the device to
the first step. Activations are what of the peak is no state. Device is how fast the ranks' devices are, measured at the
end (`shardkit.speed`).
On a CPU every tensor is counted from its making to its end (`shardkit.memory.Lifetimes`), which slows a run down and
changes no number of it; on CUDA the numbers are the allocator's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardkit import metrics, speed
from shardkit.engines.footprint import STATES
from shardkit.engines.held import bytes_of
from shardkit.memory import Lifetimes

if TYPE_CHECKING:
    from torch import nn

    from shardkit.engines.api import Engine
    from shardkit.world import World

METHODS = {
    "cpu": "lifetimes of tensors: every storage an operator makes, from its making to its end; what an operator needs "
    "inside itself is not seen",
    "cuda": "the allocator's peak of allocated bytes",
}


class Ledger:
    """Counts the memory of one rank from here on; every rank has one."""

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        self._alive: Lifetimes | None = None
        self._states: dict[str, int] = {}
        self._peak = self._lowest = self._loading = 0
        self._steps = 0
        self._looked = -1
        # The step in which the states were looked at.
        if world.device.type == "cpu":
            self._alive = Lifetimes("cpu")
            self._alive.__enter__()
            self._alive.see([*model.parameters(), *model.buffers()])

    def watch(self, engine: Engine) -> None:
        """The engine is open: look at its state at each of its optimizer's steps.

        ZeRO makes one for each group, and frees its gradient after it: they are all there at the first.
        """
        self._loading = self._taken()

        def look(*_: Any) -> None:
            if self._looked == self._steps:
                return
            self._looked = self._steps
            self._states = {f"{part}_bytes": size for part, size in bytes_of(engine.held(), self._world.device).items()}

        engine.optimizer.register_step_pre_hook(look)

    def step(self) -> None:
        """A step has been made."""
        self._steps += 1
        taken = self._taken()
        if self._steps > 1:
            self._lowest = min(self._lowest or taken, taken)
            self._peak = max(self._peak, taken)

    def close(self) -> None:
        """Count no longer."""
        if self._alive is not None:
            self._alive.__exit__(None, None, None)
            self._alive = None

    def write(self, path: Path) -> None:
        """Gather what all ranks have counted and how fast they are, and write it on rank 0; counts no longer."""
        self.close()
        states = {f"{part}_bytes": 0 for part in STATES} | self._states
        own = {
            "rank": self._world.rank,
            **states,
            "activations_bytes": max(0, self._peak - sum(states.values())),
            "peak_bytes": self._peak,
            "lowest_peak_bytes": self._lowest,
            "loading_bytes": self._loading,
            "host_bytes": metrics.memory_bytes("cpu"),
        }
        ranks = self._world.gather(own)
        device = speed.measured(self._world)
        if self._world.rank == 0:
            method = METHODS[self._world.device.type]
            facts = {"method": method, "steps": self._steps, "ranks": ranks, "device": device}
            path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _taken(self) -> int:
        """The peak since this was asked last."""
        if self._alive is not None:
            peak, self._alive.peak = self._alive.peak, self._alive.current
            return peak
        peak = torch.cuda.max_memory_allocated(self._world.device)
        torch.cuda.reset_peak_memory_stats(self._world.device)
        return peak
