"""Every command of README.md is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return [
        line[2:]
        for block in re.findall(r"```console\n(.*?)```", text, re.S)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


# Too long for here, and what runs each instead.
ELSEWHERE: dict[str, str] = {
    "make demo": "tests/packaging and .ci/run",
    "pip install -c constraints.txt '.[all]'": "the Makefile installs the same, and tests/packaging a wheel",
    **{command: "test_compare.py" for command in commands() if "shardkit check " in command or " compare " in command},
    **{command: "test_plan.py" for command in commands() if "--measure" in command},
    **{command: "test_the_readme_resumes" for command in commands() if "mine" in command},
    "python -m pytest tests/conformance --backend tests.third_party.engines:ManualEngine": "test_third_party.py",
}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    else:
        # A bare checkout has no console scripts: what they call is the same.
        entry = {"shardkit": "shardkit.cli", "torchrun": "torch.distributed.run"}[words[0]]
        words[0:1] = [sys.executable, "-c", f"import sys; from {entry} import main; sys.exit(main())"]
    if "shardkit.launch" in words and not any(word.startswith("run_dir=") for word in words):
        words += [f"run_dir={folder / 'run'}", "train.max_steps=2"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120", "SHARDKIT_CACHE": str(folder / "cache")}
    environment = {**os.environ, **own}
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)


def without_numbers(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"[\d.,]+", "#", text)).strip()


def test_the_readme_has_commands() -> None:
    assert len(commands()) >= 9
    assert set(ELSEWHERE) <= set(commands())


HERE = [command for command in commands() if command not in ELSEWHERE]
# The first launch is for every day, those that change a word of it are slow.
LAUNCHES = [command for command in HERE if "shardkit.launch" in command and "zero4" not in command]


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow if c in LAUNCHES[1:] else ()) for c in HERE]
)
def test_a_command_of_the_readme_works(command: str, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    if "zero4" in command:
        assert done.returncode == 2
        shown = (ROOT / "README.md").read_text().split(command)[1].split("```")[0].strip().splitlines()
        printed = done.stderr.strip().splitlines()
        assert len(printed) == len(shown)
        for got, line in zip(printed, shown, strict=True):
            assert got.startswith(line.removesuffix("...").rstrip())
        assert not (tmp_path / "run").exists()
        return
    assert done.returncode == 0, done.stderr[-3000:]
    if "shardkit.launch" in command:
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["status"] == "completed" and lines[-1]["steps"] == 2
    elif "doctor" in command:
        assert "Recommended: exact" in done.stdout
    elif "shardkit plan" in command:
        shown = (ROOT / "README.md").read_text().split(command)[1].split("```")[0]
        # Estimates may move by a little; what is said may not.
        printed = without_numbers(done.stdout)
        for line in shown.strip().splitlines():
            assert line == "..." or without_numbers(line) in printed, line
    elif "explain" in command:
        assert "fsdp2" in done.stdout and "all_gather" in done.stdout.replace("-", "_")
    else:
        losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert len(losses) == 4 and losses[-1] < losses[0] / 5


@pytest.mark.slow
def test_the_readme_resumes(tmp_path: Path) -> None:
    """In their order: stop, go on elsewhere, look, convert; at steps 2 of 4 and on 2 processes."""
    shorter = {
        "runs/mine": str(tmp_path / "mine"),
        "digits.safetensors": str(tmp_path / "digits.safetensors"),
        "at_step=70": "at_step=2",
        "step-00000150": "step-00000004",
        "per_node=4": "per_node=2",
    }
    resumed = [command for command in commands() if "mine" in command]
    assert len(resumed) == 5
    for command in resumed:
        for was, now in shorter.items():
            command = command.replace(was, now)
        done = run(f"{command} train.max_steps=4" if "launch" in command else command, tmp_path)
        assert done.returncode == (75 if "stop_at_step" in command else 0), done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    assert (tmp_path / "digits.safetensors").stat().st_size > 100_000
