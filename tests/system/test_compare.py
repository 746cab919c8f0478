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


FAULTY = """
import torch
from torch import nn
from shardkit.engines.whole import clipped_step
from tests.third_party.engines import ManualEngine

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # The gradient of a bias before BatchNorm is 0 but for rounding, of which AdamW makes whole steps.
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, rows):
        return self.layers(rows)

class Drawing(Net):
    def forward(self, rows):
        return super().forward(rows * (1 + 0.1 * torch.rand_like(rows)))

class NoClip(ManualEngine):
    def step(self):
        for _, parameter in self.named:
            parameter.grad = self.reduced(parameter.grad)
        return clipped_step(self.optimizer, [p for _, p in self.named], None)

class NoDecay(ManualEngine):
    def step(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.0
        return super().step()

class Slow(ManualEngine):
    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] /= 2
        found = super().step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 2
        return found
"""


@pytest.mark.slow
def test_check_finds_faults_in_the_update_and_not_in_gradients_that_are_rounding(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    (project / "faulty.py").write_text(FAULTY)
    words = ["toy.yaml", "model={_target_: faulty.Net}", "normalization.policy=exact", "--world-sizes", "2"]
    words += ["optimizer={_target_: torch.optim.AdamW, lr: 0.01}", "scheduler=null", "train.max_grad_norm=1000"]
    summing = "tests.third_party.engines:SummingEngine"
    backends = ["ddp", "faulty:NoClip", "faulty:NoDecay", "faulty:Slow", summing]
    done = shardkit("check", *words, "--backends", ",".join(backends), "--output", "out", cwd=project)
    assert done.returncode == 5, done.stdout + done.stderr
    report = json.loads((project / "out" / "check.json").read_text())
    right, *wrong = report["places"]
    assert right["agrees"] and report["not_compared"] == ["layers.0.bias"]
    assert [each["agrees"] for each in wrong] == [False] * 4
    clip, decay, slow, sums = wrong
    assert clip["first"].startswith("weights after step") and clip["cause"].startswith("the update: clipping")
    assert decay["first"].startswith("weights after step 1") and decay["cause"].startswith(
        "the update: clipping, weight"
    )
    assert sums["first"].startswith("gradient before clipping, at step 1, of layers.0.weight: off by 1.0e+00")
    assert sums["cause"].startswith("the backward")
    assert "off by 5.0e-01" in slow["first"] and slow["cause"].startswith("the update, as gradient norms agree")
    # What ranks draw otherwise is no backend's fault.
    words[1] = "model={_target_: faulty.Drawing}"
    done = shardkit("check", *words, "train.max_steps=2", "--backends", "ddp", "--output", "drawn", cwd=project)
    assert done.returncode == 5, done.stdout + done.stderr
    (drawn,) = json.loads((project / "drawn" / "check.json").read_text())["places"]
    assert drawn["cause"].startswith("random numbers that training draws, as dropout does")


@pytest.mark.slow
def test_check_proves_the_backends_on_a_recipe(tmp_path: Path) -> None:
    recipe = ["recipes/digits-resnet.yaml", "model.width=4"]
    same = shardkit(
        *("check", *recipe, "normalization.policy=exact", "--backends", "fsdp2,zero3", "--world-sizes", "2"),
        *("--output", str(tmp_path / "same")),
    )
    assert same.returncode == 0, same.stdout + same.stderr
    found = json.loads((tmp_path / "same" / "check.json").read_text())["places"]
    assert [each["place"] for each in found] == ["fsdp2-2", "zero3-2"]
    assert all(each["agrees"] and each["errors"]["weights"] > 0 for each in found)
    other = shardkit("check", *recipe, "--backends", "ddp", "--world-sizes", "2", "--output", str(tmp_path / "keep"))
    assert other.returncode == 5, other.stderr
    # One process and two cut a window into the same micro-batches: only the running statistics see who had which.
    assert "ddp-2: buffers after step 1 of stem.1.running_mean" in other.stdout
    assert "probably BatchNorm statistics" in other.stdout
