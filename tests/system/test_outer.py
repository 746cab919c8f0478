"""Under a launcher that has started the ranks already, shardkit is a rank and starts nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shardkit.launch import outer
from tests.system.launches import Ended, finish, launch, metrics, start


@pytest.fixture(scope="module")
def torchrun(project: Path) -> Ended:
    arguments = ["--standalone", "--nproc-per-node=2", "--log-dir=elastic", "-m", "shardkit.launch", "toy.yaml"]
    return launch(project, *arguments, "launch.nproc_per_node=1", module="torch.distributed.run")


def test_torchrun_is_not_nested(torchrun: Ended, project: Path) -> None:
    assert torchrun.code == 0, torchrun.err
    (run,) = (project / "runs" / "toy").iterdir()
    lines = metrics(run)
    assert lines[-1]["status"] == "completed"
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6, 7]
    assert "printed by rank 0 of 2" in torchrun.out
    assert "printed by rank 1 of 2" in (run / "logs" / "rank-1.log").read_text()


def test_torchruns_number_of_ranks_counts_and_is_said_once(torchrun: Ended) -> None:
    assert torchrun.err.count("launch.nproc_per_node is 1, but torchrun started 2") == 1


def test_srun_is_not_nested_and_a_failure_is_told_by_the_rank(project: Path) -> None:
    def task(rank: int) -> subprocess.Popen[str]:
        slurm = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "localhost",
        }
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        return start(project, "toy.yaml", "run_dir=runs/srun", "data.train.fault=raise", **slurm, **place)

    tasks = [task(0), task(1)]
    first, second = (finish(process, 0.0) for process in tasks)
    assert (first.code, second.code) == (1, 1)
    assert "ValueError: no such row in the middle of the night" in second.err
    assert "Traceback" not in first.err and "peer" in first.err
    assert metrics(project / "runs/srun")[-1]["status"] == "failed"


def test_a_mistake_under_srun_is_told_by_rank_0_only(project: Path) -> None:
    slurm = {
        "SLURM_JOB_ID": "4712",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }
    tasks = [
        start(
            project,
            "toy.yaml",
            "train.max_stepps=1",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            **slurm,
        )
        for rank in (0, 1)
    ]
    first, second = (finish(process, 0.0) for process in tasks)
    assert (first.code, second.code) == (2, 2)
    assert "max_stepps" in first.err
    assert second.err == ""


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu[007-009,12],cpu1", "gpu007"),
        ("a1,b[2-3]", "a1"),
        ("r[1-2]n", "r1n"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert outer.first_host(nodes) == host


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"},
        # A batch script, an interactive shell of salloc, a step of one task.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    ],
)
def test_part_of_a_ranks_environment_is_no_outer_launcher(environ: dict[str, str]) -> None:
    assert outer.find(environ) is None
