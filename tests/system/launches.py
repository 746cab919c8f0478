"""Real launches of a small run: a linear model on data made in memory, with a fault where a test wants one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import shardkit

SECONDS = 120.0  # a launch takes 5 s on an idle machine

TOY = '''
import os, signal, sys, time
import torch

class Numbers(torch.utils.data.Dataset):
    """Rows and their sums; with a fault in one rank, in the middle of the second epoch."""
    def __init__(self, size=20, fault=None, rank=1, pause=0.0):
        self.size, self.fault, self.rank, self.pause, self.seen = size, fault, rank, pause, 0
        if fault == "early":
            open(fault + ".now", "w").close()
            raise ValueError("no data tonight")
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        self.seen += 1
        time.sleep(self.pause)
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if self.fault and self.seen > 12 and torch.distributed.get_rank() == self.rank:
            open(self.fault + ".now", "w").close()
            if self.fault == "raise":
                raise ValueError("no such row in the middle of the night")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.fault == "refuse":
                from shardkit.errors import RequestError
                raise RequestError("not on this rank")
            if self.fault == "broken":
                open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").close()
                os._exit(3)
            if self.fault == "exit":
                sys.exit(7)
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "nan":
                row = row * float("nan")
        return row, row.sum()

def squares(model, batch):
    rows, sums = batch
    return (model(rows).squeeze(1) - sums).square().sum(), len(rows)

class Squares:
    def __call__(self, model, batch):
        print("printed by rank", torch.distributed.get_rank(), "of", torch.distributed.get_world_size())
        return squares(model, batch)
    def count(self, batch):
        return len(batch[0])
    def metrics(self, model, batch):
        total, count = squares(model, batch)
        return {"loss": (total, count), "twos": (torch.tensor(2.0) * count, count)}

def batches(items):
    return torch.utils.data.default_collate(items)
'''

RECIPE = """\
name: toy
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data:
  train: {_target_: toy.Numbers}
  eval: {_target_: toy.Numbers, size: 7}
loss: {_target_: toy.Squares}
optimizer: {_target_: torch.optim.SGD, lr: 0.05}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 2, gamma: 0.5}
batch: {global_batch_size: 8, micro_batch_size: 2}
train: {max_steps: 7}
evaluation: {every: 4}
backend: ddp
launch: {nproc_per_node: 2, device: cpu}
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A launch that has ended."""

    code: int
    out: str
    err: str
    seconds: float
    at: float
    # Time of day.


def make_project(folder: Path) -> Path:
    """A user's folder with a recipe and the module it names."""
    (folder / "toy.py").write_text(TOY)
    (folder / "toy.yaml").write_text(RECIPE)
    return folder


def environment(**more: str) -> dict[str, str]:
    """The environment of a user's shell: nothing in it says that a rank is meant."""
    found = [
        more.pop("PYTHONPATH", ""),
        os.environ.get("PYTHONPATH", ""),
        str(Path(shardkit.__file__).parents[1]),
    ]
    more["PYTHONPATH"] = os.pathsep.join(filter(None, found))
    unwanted = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "OMP_NUM_THREADS",
        "TORCHELASTIC_",
        "SLURM_",
        "PET_",
        "MASTER_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return {**kept, "TERM": "xterm", "COLUMNS": "120", **more}


def start(project: Path, *arguments: str, module: str = "shardkit.launch", **more: str) -> subprocess.Popen[str]:
    """Start a launch in a session of its own, as from a shell's job."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=project,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], begun: float) -> Ended:
    """Wait for a launch to end."""
    out, err = process.communicate(timeout=SECONDS)
    took = time.monotonic() - begun
    return Ended(code=process.returncode, out=out, err=err, seconds=took, at=time.time())


def launch(project: Path, *arguments: str, module: str = "shardkit.launch", **more: str) -> Ended:
    """A launch from its start to its end."""
    begun = time.monotonic()
    return finish(start(project, *arguments, module=module, **more), begun)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, each read as strict JSON."""
    return [json.loads(line, parse_constant=_refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int = 2) -> None:
    """Until a run has made a few steps."""
    deadline = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run makes no step"
        time.sleep(0.05)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes under a launch: ranks and their data loaders."""
    return psutil.Process(process.pid).children(recursive=True)


def survivors(processes: list[psutil.Process], seconds: float = 2.0) -> list[psutil.Process]:
    """Which of them are still there after some time; a zombie is not."""
    _, alive = psutil.wait_procs([p for p in processes if p.is_running()], timeout=seconds)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")
