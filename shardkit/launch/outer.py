"""Launchers that started this process already: torchrun, or srun with a task for each rank.

Under one of them this process is a rank and starts no others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardkit.launch.stopping import RESUMABLE

TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")

# Slurm numbers the steps that srun did not start (batch, interactive, extern) from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The launcher above, and this process's place in its world."""

    name: Literal["torchrun", "srun"]
    rank: int
    size: int
    local_size: int
    environment: dict[str, str] = field(default_factory=dict)
    # What the rank needs to find besides what is set already.


def find(environ: Mapping[str, str]) -> Outer | None:
    """The launcher that started this process, or None when it was started by hand."""
    if all(environ.get(name) for name in TORCHRUN):
        size = int(environ["WORLD_SIZE"])
        return Outer(
            name="torchrun",
            rank=int(environ["RANK"]),
            size=size,
            local_size=int(environ.get("LOCAL_WORLD_SIZE", size)),
        )
    return _srun(environ)


def code_of_stop(name: str) -> int:
    """What a rank ends with under a launcher when the run stopped early on request.

    srun hands a code on; torchrun takes any but 0 for a failure of the rank.
    """
    return RESUMABLE if name == "srun" else 0


def left_over(environ: Mapping[str, str]) -> dict[str, str]:
    """Rank variables that are set although no launcher set them all."""
    return {name: environ[name] for name in RANK_VARIABLES if name in environ}


def _srun(environ: Mapping[str, str]) -> Outer | None:
    step = environ.get("SLURM_STEP_ID", "")
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    rank = environ.get("SLURM_PROCID", "")
    if not (step.isdigit() and tasks.isdigit() and rank.isdigit()):
        return None
    if int(step) >= _FIRST_SPECIAL_STEP or int(tasks) < 2:
        return None
    job = int(environ.get("SLURM_JOB_ID", "0"))
    on_node = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Outer(
        name="srun",
        rank=int(rank),
        size=int(tasks),
        local_size=int(on_node.group()) if on_node else int(tasks),
        environment={
            "RANK": rank,
            "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
            "WORLD_SIZE": tasks,
            "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_JOB_NODELIST", "")),
            # Below the kernel's ephemeral ports; another step of the same job gets another one.
            "MASTER_PORT": environ.get("MASTER_PORT") or str(15000 + (job * 7 + int(step)) % 15000),
        },
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[007-009,12],cpu1` -> `gpu007`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else "127.0.0.1"
