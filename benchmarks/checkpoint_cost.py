"""What checkpoints cost: time as ratios to what else could be done, peak memory a rank, bytes written.

    python benchmarks/checkpoint_cost.py
    python benchmarks/checkpoint_cost.py --quick

50 million parameters in odd sizes (fp32, AdamW: 601 MB of state), two ranks on gloo, one local disk. A repeat times all
contestants of a backend once, in turn, after a sync; a ratio is of one repeat, and its median and range are over the
repeats. "async waits" is what training waits for an asynchronous save, to what it waits for a synchronous one; both
with the reading back and deleting of keep_last. It then copies the moments while the next window runs, which is not
part of it. Memory is the highest resident size during the call (VmHWM) less that before it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shardkit
from shardkit.checkpoint.keeper import Keeper
from shardkit.checkpoint.storage import open_storage
from shardkit.recipe.schema import Checkpoint

RANKS, WIDTH, LAYERS = 2, 1021, 48
MIB = 2**20
BACKENDS = ("ddp", "fsdp2", "zero2", "zero3")


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def open_trained(backend: str) -> Any:
    """An engine that has made one step, so that there are moments."""
    torch.manual_seed(0)
    engine = shardkit.open_engine(
        backend, model(), lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4), blocks=["*"]
    )
    x = torch.randn(4, WIDTH)
    shardkit.train_step(engine, [(x, x)], nn.MSELoss())
    return engine


class Measured:
    """Seconds and the peak of resident memory of a block."""

    def __enter__(self) -> Measured:
        os.sync()
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")
        dist.barrier()
        self.begun = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self.begun
        self.memory = resident("VmHWM") - self.before


def resident(field: str) -> float:
    """MiB, from the kernel's account of this process."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field))
    return int(line.split()[1]) / 1024


def contestants(backend: str, engine: Any, folder: Path) -> dict[str, Callable[[], None]]:
    """Name -> what saves the whole state."""

    def ours() -> None:
        shardkit.save_checkpoint(engine, folder / "ours", step=1)

    def full() -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(engine.model, engine.optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save(state, folder / "full.pt")

    def raw_dcp() -> None:
        weights, optimizer = get_state_dict(engine.model, engine.optimizer)
        dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=str(folder / "dcp"))

    def deepspeed() -> None:
        engine.model.save_checkpoint(str(folder / "deepspeed"), tag="one")

    if backend.startswith("zero"):
        return {"ours": ours, "DeepSpeed": deepspeed}
    return {"ours": ours, "torch.save, full": full, "DCP": raw_dcp}


def rank_main(rank: int, backend: str, folder: str, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    place = Path(folder)
    store = dist.FileStore(str(place / "store"), RANKS)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    engine = open_trained(backend)
    found: dict[str, list[tuple[float, float]]] = {}

    def measure(name: str, action: Callable[[], None]) -> None:
        with Measured() as measured:
            action()
        # A collective save takes as long as its slowest rank.
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, (measured.seconds, measured.memory))
        found.setdefault(name, []).append((max(s for s, _ in everyone), max(m for _, m in everyone)))

    behind, before = (
        Keeper(engine, open_storage(str(place / str(asynchronous))), Checkpoint(asynchronous=asynchronous, keep_last=1))
        for asynchronous in (True, False)
    )
    behind.save(1, {}, b"{}")  # The host memory of snapshots is made once.
    behind.close()
    for repeat in range(repeats):
        for name, action in contestants(backend, engine, place).items():
            measure(name, action)
        measure("ours, load", lambda: void(shardkit.load_checkpoint(engine, place / "ours")))
        measure("ours, waiting for a save", lambda: void(before.save(2 + repeat, {}, b"{}")))  # noqa: B023
        measure("ours, waiting for an asynchronous save", lambda: void(behind.save(2 + repeat, {}, b"{}")))  # noqa: B023
        behind.close()
    if rank == 0:
        ours = place / "ours" / "step-00000001"
        results["written"] = sum(path.stat().st_size for path in ours.iterdir()) / MIB
        results["shards"] = [path.stat().st_size / MIB for path in sorted(ours.glob("shard-*"))]
        results["found"] = found
    dist.barrier()
    os._exit(0)


def void(_: Any) -> None:
    """A call for its effect."""


def run(backend: str, repeats: int) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="checkpoint-cost-")
    with mp.Manager() as manager:
        results = manager.dict()
        try:
            mp.spawn(rank_main, (backend, folder, repeats, results), nprocs=RANKS)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return dict(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    repeats = 1 if asked.quick else asked.repeats
    state = 3 * 4 * sum(p.numel() for p in model().parameters()) / MIB
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs, {repeats} repeats,")
    print(f"{state:.0f} MiB of weights and moments, {RANKS} ranks\n")
    print("| backend | save: MiB more a rank | load: MiB more a rank | MiB written | MiB largest shard | async waits |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for backend in BACKENDS:
        result = run(backend, repeats)
        found = result["found"]
        waited = found["ours, waiting for an asynchronous save"]
        waits = [ours[0] / whole[0] for ours, whole in zip(waited, found["ours, waiting for a save"], strict=True)]
        print(
            f"| {backend} | {max(m for _, m in found['ours']):.0f} | {max(m for _, m in found['ours, load']):.0f} | "
            f"{result['written']:.0f} | {max(result['shards']):.0f} | {median(waits):.3f} |",
            flush=True,
        )
        for other in (name for name in found if not name.startswith("ours")):
            each = [own[0] / its[0] for own, its in zip(found["ours"], found[other], strict=True)]
            memory = max(m for _, m in found[other])
            spread = f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
            seconds = median(own[0] for own in found["ours"])
            ratios.append(f"| {backend}: {other} | {spread} | {seconds:.2f} | {memory:.0f} |")
    print("\n| ours against | time of ours / its | ours, s | its MiB more a rank |\n|---|---|---|---|")
    print("\n".join(ratios))


if __name__ == "__main__":
    sys.exit(main())
