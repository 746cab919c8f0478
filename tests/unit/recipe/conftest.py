"""A small sound recipe, and ways to write, load and break it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.engines.registry import options_of
from shardkit.errors import Problem, RecipeError
from shardkit.recipe.load import Loaded, load

SOUND = """\
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data:
  train: {_target_: torch.utils.data.TensorDataset}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer:
  _target_: torch.optim.SGD
  lr: 1e-4
batch:
  global_batch_size: 8
  micro_batch_size: 2
train:
  max_steps: 100
backend: ddp
"""

Load = Callable[..., Loaded]
Refuse = Callable[..., tuple[Problem, ...]]


@pytest.fixture
def load_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads the text as the file `recipe.yaml`; `extra` is put under the sound recipe."""
    monkeypatch.chdir(tmp_path)

    def loaded(*overrides: str, text: str = SOUND, extra: str = "") -> Loaded:
        Path("recipe.yaml").write_text(text + extra, encoding="utf-8")
        return load("recipe.yaml", overrides, options_of=options_of)

    return loaded


@pytest.fixture
def refuse(load_text: Load) -> Refuse:
    """The problems of a recipe that must have some."""

    def problems(*overrides: str, text: str = SOUND, extra: str = "") -> tuple[Problem, ...]:
        with pytest.raises(RecipeError) as caught:
            load_text(*overrides, text=text, extra=extra)
        return caught.value.problems

    return problems
