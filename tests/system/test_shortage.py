"""A rank whose memory runs out ends the run, and the plan says what it needs and what needs less."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.launch.failure import Failure, Kind
from shardkit.launch.shortage import told
from shardkit.run_folder import RunFolder
from tests.system.launches import launch

WIDE = '''
import os, resource
import psutil
from torch import nn

class Wide(nn.Module):
    """Four wide blocks; a rank may take no more than a GiB from here on."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 65536), nn.ReLU(), nn.Linear(65536, 64)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(64, 10)
        if "LOCAL_RANK" in os.environ:
            limit = psutil.Process().memory_info().vms + 2**30
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def forward(self, x):
        x = x.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
'''
RECIPE = """
name: wide
model: {_target_: wide_model.Wide}
data: {train: {_target_: shardkit.data.digits.Digits, split: train, size: 8}}
loss: {_target_: shardkit.losses.CrossEntropy}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
batch: {global_batch_size: 1024, micro_batch_size: 1024}
train: {max_steps: 2}
run_dir: runs/wide
backend: single
"""


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("sklearn")
    (tmp_path / "wide_model.py").write_text(WIDE)
    (tmp_path / "wide.yaml").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path


def test_out_of_memory_quotes_the_plan(wide: Path) -> None:
    ended = launch(wide, "wide.yaml")
    assert ended.code == 1
    assert ended.err.count("can't allocate memory") >= 1, ended.err
    lines = [line for line in ended.err.splitlines() if line.startswith("shardkit: ")]
    plan = next(line for line in lines if "by the plan rank 0 needs" in line)
    assert "single on 1 rank with micro-batches of 1024" in plan and "activations 1.5 GiB" in plan
    # This machine has more than the limit that the rank gave itself.
    assert any("so it should fit" in line for line in lines)
    assert lines[-1] == "shardkit: it needs less with batch.micro_batch_size=512"


def test_what_does_not_fit_is_told_with_what_does(wide: Path) -> None:
    folder = RunFolder(wide / "run")
    folder.path.mkdir()
    folder.recipe.write_text(RECIPE)
    cause = Failure(rank=0, kind=Kind.RAISED, time=0.0, summary="", shortage=True, memory=2**30)
    lines = told(folder, cause, 1).splitlines()
    assert "by the plan rank 0 needs" in lines[0] and "of 1 GiB" in lines[0]
    assert len(lines) == 2 and lines[1] == "shardkit: it fits with batch.micro_batch_size=128"


def test_a_recipe_that_cannot_be_planned_says_why(wide: Path) -> None:
    folder = RunFolder(wide / "run")
    folder.path.mkdir()
    folder.recipe.write_text(RECIPE.replace("Wide}", "Wide, missing: 1}"))
    cause = Failure(rank=1, kind=Kind.KILLED, time=0.0, summary="", shortage=True)
    with pytest.raises(Exception, match="missing"):
        told(folder, cause, 1)
