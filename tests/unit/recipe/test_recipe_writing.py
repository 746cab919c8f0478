from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.engines.registry import options_of
from shardkit.recipe.load import load
from tests.unit.recipe.conftest import Load

TEXTS = [
    "1e-4",
    "0123",
    "true",
    "null",
    "",
    " x ",
    "a: b # c",
    "${seed}",
    "\\${seed}",
    "it's",
    '"',
    "*.bias",
    "- a",
    "???x",
]
TEXTS += [
    "\u00e9\U0001f600\u2028\x85",
    "line\nline\ttab",
    "~",
    "12:30",
    "<<",
    "@x",
    "{a}",
    "[",
    "x" * 300,
    ".inf",
    "off",
]


def test_what_is_written_loads_to_the_same_recipe(load_text: Load, tmp_path: Path) -> None:
    overrides = [
        "seed=1",
        "model.in_features=.inf",
        "optimizer.eps=1e-300",
        "optimizer.betas=[0.9, [], {}]",
    ]
    overrides += [
        "parameter_groups=[{match: '*.b', options: {a: [{b: 1}]}}, {match: y}]",
        "data.eval=${data.train}",
    ]
    loaded = load_text(*overrides)
    loaded.recipe.model["texts"] = TEXTS
    loaded.recipe.model |= {text: 1 for text in TEXTS if text != "<<"}
    (tmp_path / "resolved.yaml").write_text(loaded.to_yaml(), encoding="utf-8")
    assert load("resolved.yaml", options_of=options_of).recipe == loaded.recipe


@pytest.mark.parametrize("name", ["single", "zero3-offload"])
def test_a_resolved_recipe_stands_alone(load_text: Load, tmp_path: Path, name: str) -> None:
    loaded = load_text(f"backend={name}")
    (tmp_path / "resolved.yaml").write_text(loaded.to_yaml())
    assert load("resolved.yaml", options_of=options_of).recipe == loaded.recipe
    assert load("resolved.yaml", ["backend=fsdp2"], options_of=options_of).recipe.backend.name == "fsdp2"


def test_each_value_that_was_given_says_where(load_text: Load) -> None:
    lines = load_text("seed=1", "run_dir=it's").to_yaml().splitlines()
    assert "seed: 1  # command line 'seed=1'" in lines
    assert """run_dir: "it's"  # command line "run_dir=it's\"""" in lines
    assert "  lr: 0.0001  # recipe.yaml:7:3" in lines
    assert "  adapter: ddp  # backends/ddp.yaml:3:1" in lines
    assert "  precision: fp32" in lines
