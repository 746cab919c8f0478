"""What cannot be traced says why, where and what to do, and what a backend refuses is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.engines import registry
from shardkit.errors import RequestError
from shardkit.planning.device import load_device
from shardkit.planning.plan import Plan, Wanted, plan
from shardkit.recipe.load import load

MODELS = """
import torch
from torch import nn

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        y = self.linear(x.flatten(1))
        return y * y.abs().max().item()

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(8, 10, batch_first=True)

    def forward(self, x):
        return self.cells(x[:, 0])[0][:, -1]

class Scaled(Reads):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.linear(x.flatten(1)) * self.scale

class Frozen(Scaled):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
"""
RECIPE = """
model: {_target_: models_to_trace.NAME}
data: {train: {_target_: shardkit.data.digits.Digits, split: train, size: 8}}
loss: {_target_: shardkit.losses.CrossEntropy}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
batch: {global_batch_size: 8, micro_batch_size: 2}
train: {max_steps: 1}
backend: ddp
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("sklearn")
    (tmp_path / "models_to_trace.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def planned(folder: Path, name: str, memory: int = 2**34) -> Plan:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("NAME", name))
    loaded = load(str(path), [], options_of=registry.options_of)
    device = load_device("cpu").with_memory(memory)
    return plan(loaded, Wanted(device=device, world_sizes=(2,), backends=("ddp", "fsdp2", "zero2")))


def test_a_value_that_is_read_is_told_with_its_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = planned(folder, "Reads")
    assert found.recommended is None and {row.fits for row in found.rows} == {None}
    line = next(n for n, text in enumerate(MODELS.splitlines(), 1) if ".item()" in text)
    for row in found.rows:
        assert row.unknown.startswith(f"models_to_trace.py:{line}: something depends on the values of a tensor")
        assert "--measure" in row.unknown and row.peak is None
        # States are known all the same.
        assert row.footprint is not None and row.footprint.parameters > 0
    assert "Traceback" not in caplog.text


def test_what_does_not_fit_without_activations_does_not_fit(folder: Path) -> None:
    found = planned(folder, "Reads", memory=2**20)
    assert {row.fits for row in found.rows} == {False} and found.recommended is None


def test_recurrent_layers_are_not_guessed(folder: Path) -> None:
    found = planned(folder, "Recurrent")
    assert found.recommended is None
    assert all("'cells' is a recurrent layer of torch" in row.unknown for row in found.rows)


def test_what_a_backend_refuses_when_it_starts_is_refused(folder: Path) -> None:
    found = planned(folder, "Scaled")
    refused = {row.choice.backend for row in found.rows if "scale has no dimension" in row.refused}
    assert refused == {"fsdp2", "zero2"}
    assert found.recommended is not None and found.recommended.choice.backend == "ddp"


def test_nothing_to_train_is_refused_as_in_a_launch(folder: Path) -> None:
    with pytest.raises(RequestError, match="no parameter that requires a gradient"):
        planned(folder, "Frozen")
