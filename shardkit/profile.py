"""profile.json of a run: the memory and the communication of each rank, and what starting and saving took.

{"ranks": [{"rank", "allocated_bytes", "reserved_bytes", "host_bytes", "communication": {kind: {"calls", "bytes"}}}],
"first_step_seconds", "steps", "checkpoint_bytes", "save_seconds", "load_seconds"}; null where there is none.

Communication is the mean of an optimizer step over the steps after the second, by which the libraries have made their
plans, or over what there is of a shorter run; evaluations and checkpoints are not part of it. Memory is the peak of the
run: of CUDA's allocator, and resident in host memory. `first_step_seconds` go from the beginning of `train` to the end
of this process's first step, `save_seconds` is the mean of what training waited for a checkpoint, `load_seconds` what
it waited to go on from one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardkit import metrics
from shardkit.checkpoint.history import steps
from shardkit.checkpoint.storage import Storage
from shardkit.communication import Counts, Traffic, added, counted
from shardkit.progress import Progress, Watched

if TYPE_CHECKING:
    from shardkit.checkpoint.training import Position
    from shardkit.loop import Saving
    from shardkit.world import World

SETTLING = 2
# Steps in which the libraries make their plans.
T = TypeVar("T")


class Profile:
    """What one rank notes of a run; it changes no number of it."""

    def __init__(self, world: World, counts: Counts) -> None:
        self.world, self.counts = world, counts
        self._begun = time.perf_counter()
        self._first: float | None = None
        self._steps: list[Traffic] = []
        # At most SETTLING single steps, and then the sum of all others.
        self._count = 0
        self._saves: list[float] = []
        self._load: float | None = None

    def step(self) -> None:
        """A step has been made."""
        taken = self.counts.take()
        if self._first is None:
            self._first = time.perf_counter() - self._begun
        self._count += 1
        if self._count > SETTLING + 1:
            taken = added(self._steps.pop(), taken)
        self._steps.append(taken)

    def loaded(self, seconds: float) -> None:
        """The run went on from a checkpoint, or started with weights from elsewhere."""
        self._load = seconds

    def uncounted(self, call: Callable[[], T]) -> Callable[[], T]:
        """`call`, whose collectives belong to no step."""

        def paused() -> T:
            with self.counts.paused():
                return call()

        return paused

    def watching(self, progress: Progress) -> Progress:
        """`progress`, which also tells this profile each step."""
        return Watched(progress, self.step)

    def saving(self, saving: Saving) -> Saving:
        """`saving`, whose collectives belong to no step and whose time is noted."""
        return _Saves(self, saving)

    def saved(self, seconds: float) -> None:
        self._saves.append(seconds)

    def write(self, path: Path, checkpoint_bytes: int | None) -> None:
        """Gather what all ranks have noted, and write it on rank 0."""
        self.counts.take()
        ranks = self.world.gather(self._own())
        if self.world.rank == 0:
            facts = {
                "ranks": ranks,
                "first_step_seconds": self._first,
                "steps": self._count,
                "checkpoint_bytes": checkpoint_bytes,
                "save_seconds": sum(self._saves) / len(self._saves) if self._saves else None,
                "load_seconds": self._load,
            }
            path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _own(self) -> dict[str, Any]:
        on_device = self.world.device.type == "cuda"
        return {
            "rank": self.world.rank,
            "allocated_bytes": torch.cuda.max_memory_allocated(self.world.device) if on_device else None,
            "reserved_bytes": torch.cuda.max_memory_reserved(self.world.device) if on_device else None,
            "host_bytes": metrics.memory_bytes("cpu"),
            "communication": self._per_step(),
        }

    def _per_step(self) -> dict[str, dict[str, float]]:
        made = max(1, self._count - SETTLING)
        settled = self._steps[-1] if self._steps else {}
        return {
            kind: {"calls": metrics.whole((volume.calls or 0) / made), "bytes": metrics.whole(volume.bytes / made)}
            for kind, volume in sorted(settled.items())
        }


@contextmanager
def profiling(world: World) -> Iterator[Profile]:
    """Note what happens within."""
    with counted() as counts:
        yield Profile(world, counts)


def newest_bytes(storage: Storage) -> int | None:
    """Bytes of the newest checkpoint of a run; None without one."""
    names = [name for _, name in sorted(steps(storage))]
    return sum(storage.size(f"{names[-1]}/{file}") for file in storage.names(names[-1])) if names else None


class _Saves:
    def __init__(self, profile: Profile, saving: Saving) -> None:
        self._profile, self._saving = profile, saving

    def asks(self) -> bool:
        return self._saving.asks()

    def is_due(self, step: int, *, asked: bool, scores: Mapping[str, float] | None) -> bool:
        return self._saving.is_due(step, asked=asked, scores=scores)

    def save(self, position: Position) -> bool:
        begun = time.perf_counter()
        saved = self._profile.uncounted(lambda: self._saving.save(position))()
        self._profile.saved(time.perf_counter() - begun)
        return saved

    def close(self) -> int | None:
        return self._profile.uncounted(self._saving.close)()
