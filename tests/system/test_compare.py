"""`shardkit compare`, `check` and `runs` as a person types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.launches import environment, make_project

ROOT = Path(__file__).parents[2]
# The command itself: unlike `python -c` and `-m` it does not import from the working directory by itself.
SHARDKIT = [str(Path(sys.executable).with_name("shardkit"))]
SECONDS = 900.0


def shardkit(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SHARDKIT, *words], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )


def verdicts_in(folder: Path) -> dict[str, Any]:
    """Arm -> its verdict in report.json."""
    return {each["arm"]: each for each in json.loads((folder / "report.json").read_text())["arms"]}


def test_what_is_wrong_with_every_arm_is_told_once_before_anything_starts(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    done = shardkit("compare", "toy.yaml", "--backends", "ddp,fsdp2", "loss._target_=toy.nothing", cwd=project)
    place = "command line 'loss._target_=toy.nothing': loss._target_"
    assert done.returncode == 2 and done.stderr == f"{place}: 'toy.nothing': 'toy' has no 'nothing'\n"
    assert not (project / "runs").exists()


@pytest.mark.slow
def test_a_comparison_that_is_cut_off_goes_on_and_an_arm_that_fails_is_told(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    # The third arm's items raise in rank 1.
    words = ["compare", "toy.yaml", "--backends", "ddp,fsdp2", "--output", "out", "--repeats", "2"]
    words += ["--arm", "broken: data.train.fault=raise"]
    first = subprocess.Popen([*SHARDKIT, *words], cwd=project, env=environment(), stderr=subprocess.PIPE, text=True)
    ended = project / "out" / "ddp" / "repeat-1" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (ended.exists() and '"completed"' in ended.read_text()):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode not in (0, 5)
    made = ended.stat().st_mtime_ns
    done = shardkit(*words, cwd=project)
    assert done.returncode == 1, done.stderr
    # What was complete was not made again, and the failed arm did not keep the others from running.
    assert ended.stat().st_mtime_ns == made
    found = verdicts_in(project / "out")
    assert {arm: each["verdict"] for arm, each in found.items()} == {
        "ddp": "equivalent",
        "fsdp2": "equivalent",
        "broken": "failed",
    }
    assert "no such row in the middle of the night" in found["broken"]["errors"][0]
    # The terminal's table breaks lines.
    assert "broken" in done.stdout and "no such row" in " ".join(done.stdout.split())
    # Another comparison does not go into the same folder.
    other = shardkit(*words[:-1], "broken: data.train.fault=kill", cwd=project)
    assert other.returncode == 2 and "holds another comparison" in other.stderr
    # Finished runs are compared, and listed.
    again = shardkit("compare", "out/ddp/repeat-1", "out/ddp/repeat-2", "--output", "pair", cwd=project)
    assert again.returncode == 0 and "equal to the last bit" in again.stdout + (project / "pair/report.md").read_text()
    twice = shardkit("compare", "out/ddp/repeat-1", "out/ddp/../ddp/repeat-1", cwd=project)
    assert twice.returncode == 2 and "is named twice" in twice.stderr
    failed = shardkit("compare", "out/ddp/repeat-1", "out/broken/repeat-1", "--output", "failed", cwd=project)
    assert failed.returncode == 1 and verdicts_in(project / "failed")["broken/repeat-1"]["verdict"] == "failed"
    (project / "out" / "broken" / "repeat-2" / "metrics.jsonl").write_text("{")
    listed = json.loads(shardkit("runs", "out", "--json", cwd=project).stdout)
    assert sorted(run["status"] for run in listed) == ["completed"] * 4 + ["cut off", "failed"]


@pytest.mark.slow
def test_backends_are_equivalent_under_exact_and_the_arm_that_is_not_is_named(tmp_path: Path) -> None:
    done = shardkit(
        "compare",
        "recipes/digits-resnet.yaml",
        "normalization.policy=exact",
        "--backends",
        "ddp,fsdp2,zero1,zero2,zero3,accelerate-zero2",
        "--arm",
        "keep8: backend=ddp normalization.policy=keep batch.micro_batch_size=8",
        *("--steps", "30", "--repeats", "2", "--output", str(tmp_path / "out")),
    )
    assert done.returncode == 5, done.stderr
    found = verdicts_in(tmp_path / "out")
    different = found.pop("keep8")
    assert {arm: each["verdict"] for arm, each in found.items()} == dict.fromkeys(found, "equivalent")
    assert len(found) == 6
    assert different["verdict"] == "different" and different["equivalence"]["step"] == 1
    assert different["cause"].startswith("BatchNorm statistics by rank and micro-batch")
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(page) < 5_000_000 and 'src="http' not in page


@pytest.mark.slow
def test_check_proves_the_backends_on_a_recipe_and_finds_a_fault(tmp_path: Path) -> None:
    recipe = ["recipes/digits-resnet.yaml", "model.width=4"]
    same = shardkit(
        *("check", *recipe, "normalization.policy=exact", "--backends", "fsdp2,zero3", "--world-sizes", "1,2"),
        *("--output", str(tmp_path / "same")),
    )
    assert same.returncode == 0, same.stdout + same.stderr
    found = json.loads((tmp_path / "same" / "check.json").read_text())["places"]
    assert len(found) == 4 and all(each["agrees"] for each in found)
    assert all(each["errors"]["weights"] > 0 for each in found if each["place"] in ("fsdp2-2", "zero3-2"))
    other = shardkit("check", *recipe, "--backends", "ddp", "--world-sizes", "2", "--output", str(tmp_path / "keep"))
    assert other.returncode == 5, other.stderr
    # One process and two cut a window into the same micro-batches: only the running statistics see who had which.
    assert "ddp-2: buffers after step 1 of stem.1.running_mean" in other.stdout
    assert "probably BatchNorm statistics" in other.stdout
    summing = "tests.third_party.engines:SummingEngine"
    faulty = shardkit(
        *("check", *recipe, "normalization.policy=exact", "--backends", summing, "--world-sizes", "2"),
        *("--output", str(tmp_path / "summing")),
    )
    assert faulty.returncode == 5, faulty.stdout + faulty.stderr
    assert "gradient before clipping, at step 1, of stem.0.weight: off by 1.0e+00" in faulty.stdout
