"""A signal to the launcher ends the run with 128 + its number and leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.system.launches import SECONDS, family, finish, metrics, start, survivors, wait_for_steps

LONG = ["train.max_steps=100000", "data.train.size=100000", "data.train.pause=0.01", "metrics.every=1"]


def test_ctrl_c_three_times_ends_once_with_130_and_no_orphans(project: Path) -> None:
    run = project / "runs" / "int"
    process = start(project, "toy.yaml", "run_dir=runs/int", "data.num_workers=1", *LONG)
    wait_for_steps(process, run)
    started = family(process)
    assert len(started) >= 4  # two ranks, a data loader each
    begun = time.monotonic()
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    ended = finish(process, begun)
    assert ended.code == 130, ended.err
    assert ended.seconds < 10
    assert survivors(started) == []
    assert ended.err.count("stopped by SIGINT") == 1 and "Traceback" not in ended.err
    assert metrics(run)[-1]["status"] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_takes_its_ranks_along(project: Path, number: signal.Signals) -> None:
    run = project / "runs" / number.name
    process = start(project, "toy.yaml", f"run_dir={run}", "launch.nproc_per_node=1", *LONG, TMPDIR=str(project))
    wait_for_steps(process, run)
    started = family(process)
    assert len(started) >= 1
    process.send_signal(number)
    ended = finish(process, time.monotonic())
    assert ended.code == (143 if number is signal.SIGTERM else -9), ended.err
    assert survivors(started) == []


def test_ctrl_c_while_the_launcher_imports_is_one_line(project: Path) -> None:
    # A launcher that is slow to import: it stands in the middle of one when the signal comes.
    (project / "slow").mkdir()
    (project / "slow" / "omegaconf.py").write_text("import time\nopen('imports', 'w').close()\ntime.sleep(60)\n")
    process = start(project, "toy.yaml", PYTHONPATH=str(project / "slow"))
    wait_for(project / "imports", process)
    process.send_signal(signal.SIGINT)
    ended = finish(process, time.monotonic())
    assert (ended.code, ended.err) == (130, "shardkit: stopped by SIGINT\n")


def test_ctrl_c_while_the_ranks_import_is_one_line_and_the_metrics_say_it(project: Path) -> None:
    code = "import sys, time\nif '--rank=0' in sys.orig_argv:\n    open('rank', 'w').close()\n    time.sleep(60)\n"
    (project / "late").mkdir()
    (project / "late" / "sitecustomize.py").write_text(code)
    run = project / "runs" / "importing"
    process = start(project, "toy.yaml", f"run_dir={run}", *LONG, PYTHONPATH=str(project / "late"))
    wait_for(project / "rank", process)
    started = family(process)
    process.send_signal(signal.SIGINT)
    ended = finish(process, time.monotonic())
    assert ended.code == 130, ended.err
    assert ended.err.count("stopped by SIGINT") == 1 and "Traceback" not in ended.err
    assert "KeyboardInterrupt" not in ended.err
    assert survivors(started) == []
    (line,) = metrics(run)
    assert line == {"kind": "end", "status": "stopped", "steps": 0, "error": "stopped by SIGINT"}


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)
