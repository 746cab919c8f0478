"""On a terminal a run shows a bar, also when it is one rank."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.launches import environment, metrics

ONE_RANK = ["backend=single", "launch.nproc_per_node=1", "train.max_steps=30", "data.train.pause=0.005"]


@pytest.fixture(scope="module")
def shown(project: Path) -> tuple[int, str]:
    """The exit code of a run of one rank on a terminal, and all that the terminal got."""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardkit.launch", "toy.yaml", "run_dir=runs/pty", *ONE_RANK],
        cwd=project,
        env=environment(),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    received = bytearray()
    try:
        while piece := os.read(terminal, 65536):
            received += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(terminal)
    return process.wait(timeout=60), received.decode()


def test_a_terminal_gets_a_bar_and_its_cursor_back(shown: tuple[int, str], project: Path) -> None:
    code, text = shown
    assert code == 0, text
    assert "\x1b[" in text and "30/30" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "step 30/30: eval loss" in text and "completed 30 steps" in text
    assert len(metrics(project / "runs/pty")) == 30 + 30 // 4 + 1 + 1


def test_the_log_beside_a_bar_has_lines(shown: tuple[int, str], project: Path) -> None:
    assert shown[0] == 0
    log = (project / "runs/pty/logs/rank-0.log").read_text()
    assert "step 30/30: loss" in log and "\x1b" not in log
