"""A rank that fails ends the run in seconds, and the cause is named once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardkit import environment, run_folder
from shardkit.errors import RecipeError
from tests.system.launches import Ended, launch, metrics

FAULTS = {
    "raise": ["data.train.fault=raise"],
    "kill": ["data.train.fault=kill"],
    "exit": ["data.train.fault=exit", "data.train.rank=0", "launch.nproc_per_node=1"],
    "nan": ["data.train.fault=nan"],
    "hang": ["data.train.fault=hang", "launch.timeout_seconds=3"],
    "term": ["data.train.fault=term"],
    "refuse": ["data.train.fault=refuse"],
    "early": ["data.train.fault=early", "launch.nproc_per_node=1"],
    "broken": ["data.train.fault=broken", "data.train.rank=0", "launch.nproc_per_node=1"],
}


@pytest.fixture(scope="module")
def failed(project: Path) -> dict[str, Ended]:
    """A run for each fault, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(launch, project, "toy.yaml", f"run_dir=runs/{name}", *more)
            for name, more in FAULTS.items()
        }
    return {name: run.result() for name, run in runs.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_run_ends_in_seconds_with_code_1(failed: dict[str, Ended], project: Path, fault: str) -> None:
    assert failed[fault].code == 1, failed[fault].err
    # 1 to 4 s on an idle machine.
    assert failed[fault].at - (project / f"{fault}.now").stat().st_mtime < 20


@pytest.mark.parametrize("fault", FAULTS)
def test_the_metrics_say_how_it_ended(failed: dict[str, Ended], project: Path, fault: str) -> None:
    lines = metrics(project / "runs" / fault)
    assert lines[-1]["kind"] == "end" and lines[-1]["status"] == "failed"
    steps = lines[-2]["step"] if len(lines) > 1 else 0
    assert lines[-1]["steps"] == steps and (steps > 0) == (fault != "early")
    assert lines[-1]["error"] in failed[fault].err


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_of_the_agent_is_left_in_the_run_folder(failed: dict[str, Ended], project: Path, fault: str) -> None:
    logs = project / "runs" / fault / "logs"
    assert {path.name for path in logs.iterdir()} <= {"rank-0.log", "rank-1.log"}


def test_the_raising_rank_is_named_with_its_traceback_exactly_once(failed: dict[str, Ended]) -> None:
    err = failed["raise"].err
    first, _, rest = err.partition("shardkit: rank 1 failed: ValueError: no such row in the middle of the night\n")
    assert rest.startswith("Traceback (most recent call last):")
    assert err.count("Traceback") == 1
    assert rest.count("ValueError: no such row in the middle of the night") == 1
    assert "runs/raise/logs/rank-1.log" in rest
    assert "closed by peer" not in err and "ChildFailedError" not in err
    assert "rank" not in first.replace("printed by rank", "").replace("for 2 ranks", "")


def test_the_log_of_the_failed_rank_has_the_traceback(failed: dict[str, Ended], project: Path) -> None:
    assert failed["raise"].code == 1
    assert "no such row in the middle of the night" in (project / "runs/raise/logs/rank-1.log").read_text()


def test_a_killed_rank_is_named_with_the_signal(failed: dict[str, Ended]) -> None:
    assert failed["kill"].err.count("shardkit: rank 1 was killed by SIGKILL") == 1
    assert "memory" in failed["kill"].err
    assert "Traceback" not in failed["kill"].err


def test_a_rank_that_exits_by_itself_is_named_with_its_code(failed: dict[str, Ended]) -> None:
    assert "shardkit: rank 0 failed" in failed["exit"].err
    assert "sys.exit(7)" in failed["exit"].err


def test_a_loss_that_is_nan_is_named_with_rank_and_step(failed: dict[str, Ended], project: Path) -> None:
    err = failed["nan"].err
    last = metrics(project / "runs/nan")[-2]["step"]
    # All ranks raise it, and the first that the agent sees is any of them.
    assert f"shardkit: training failed: step {last + 1}: the loss is nan on rank 1" in err
    # shardkit's own errors say it all in their message; the traceback is for the log.
    assert "Traceback" not in err
    assert "NonFiniteError" in (project / "runs/nan/logs/rank-1.log").read_text()


def test_a_rank_that_hangs_is_the_one_to_look_at(failed: dict[str, Ended]) -> None:
    assert "shardkit: rank 0 timed out waiting for its peers: " in failed["hang"].err
    assert "shardkit: rank 1 did not answer" in failed["hang"].err


def test_a_rank_that_was_terminated_from_elsewhere_is_named(failed: dict[str, Ended]) -> None:
    assert "shardkit: rank 1 was killed by SIGTERM" in failed["term"].err
    assert "Traceback" not in failed["term"].err


def test_a_refusal_on_a_rank_comes_after_a_start_and_ends_with_1(failed: dict[str, Ended]) -> None:
    assert failed["refuse"].code == 1
    assert "shardkit: rank 1 failed: not on this rank" in failed["refuse"].err


def test_an_error_file_that_cannot_be_read_is_told_in_one_line(failed: dict[str, Ended]) -> None:
    assert "shardkit: the ranks could not be watched to their end: JSONDecodeError" in failed["broken"].err
    assert "Traceback" not in failed["broken"].err


PARTING = """
from torch import distributed, nn
from toy import Numbers, Squares

class Parting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, rows):
        self.calls += 1
        for index, layer in enumerate(self.layers):
            # Rank 1 leaves out a layer from the middle of the second step on.
            if not (index == 1 and self.calls > 3 and distributed.get_rank() == 1):
                rows = layer(rows)
        return self.last(rows)
"""


@pytest.mark.slow
def test_ranks_that_go_different_ways_are_told_as_that(project: Path) -> None:
    (project / "parting.py").write_text(PARTING)
    words = ["model={_target_: parting.Parting}", "blocks=['layers.*']", "launch.timeout_seconds=5", "data.eval=null"]
    words += ["evaluation.every=null"]
    # gloo ends a process where what comes is longer than what it waits for; else all wait.
    mismatch = "shardkit: its last words: [enforce fail at", "collective mismatch in your code?"
    for backend, told in {"fsdp2": ("all ranks waited, each in another collective",), "zero3": mismatch}.items():
        ended = launch(project, "toy.yaml", f"run_dir=runs/parting-{backend}", f"backend={backend}", *words)
        assert ended.code == 1 and all(said in ended.err for said in told), ended.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that a run fills in its first steps."""
    command = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a small disk")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_named(project: Path, small_disk: Path) -> None:
    more = ["train.max_steps=1000", "launch.nproc_per_node=1", "data.eval=null", "evaluation.every=null"]
    ended = launch(project, "toy.yaml", f"run_dir={small_disk / 'run'}", *more)
    assert ended.code == 1, ended.err[-2000:]
    assert "shardkit: rank 0 failed: OSError: [Errno 28] No space left on device" in ended.err
    assert ended.err.count("Traceback") == 1 and "JSONDecodeError" not in ended.err


def test_a_disk_that_is_full_from_the_start_is_a_request_that_cannot_be_met(
    small_disk: Path,
) -> None:
    (small_disk / "full").write_bytes(bytes(40 << 10))
    folder = run_folder.choose("toy", str(small_disk / "run"), place="toy.yaml:3:1")
    folder.create("x: 1\n")
    (small_disk / "more").write_bytes(bytes(4 << 10))
    with pytest.raises(RecipeError, match=r"^toy.yaml:3:1: run_dir: cannot write to .*: No space left on device"):
        environment.write_machine(folder, ["python"])
