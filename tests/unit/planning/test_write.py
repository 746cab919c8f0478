from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardkit.engines import registry
from shardkit.errors import RequestError
from shardkit.planning.plan import Row
from shardkit.planning.reason import reason
from shardkit.planning.write import write
from shardkit.recipe.load import load
from tests.unit.planning.rows import plan_of, row

RECIPE = """\
# A recipe with words in it.
name: mine    # its name
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data:
  train: {_target_: shardkit.data.digits.Digits, split: train}   # digits
loss: {_target_: shardkit.losses.CrossEntropy}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
batch:
  global_batch_size: 16   # the maths
  micro_batch_size: 4     # the memory
train: {max_steps: 3}
# How it is sharded.
backend: ddp   # replicas
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def written(recipe: Path, *rows: Row, overrides: tuple[str, ...] = (), **more: Any) -> tuple[str, dict[str, Any], str]:
    """The text, the keys whose resolved values differ, and what was said."""
    loaded = load(recipe, overrides, options_of=registry.options_of)
    plan = plan_of(*rows, loaded=loaded)
    path = recipe.parent / "deep" / "planned.yaml"
    said = write(plan, reason(plan), recipe=str(recipe), overrides=overrides, path=path, **more)
    was, now = flat(asdict(loaded.recipe)), flat(asdict(load(path, options_of=registry.options_of).recipe))
    return (
        path.read_text(),
        {key: now.get(key) for key in was.keys() | now.keys() if was.get(key) != now.get(key)},
        said,
    )


def flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, each in value.items() for k, v in flat(each, f"{key}.{name}").items()}
    return {key[1:]: value}


def test_only_the_backend_changes_and_comments_stay(recipe: Path) -> None:
    text, changed, said = written(recipe, row("fsdp2", 2))
    assert changed == {
        "backend.name": "fsdp2",
        "backend.adapter": "fsdp2",
        "backend.options": None,
        "backend.options.reshard_after_forward": True,
    }
    first, rest = text.split("\n", 1)
    assert first == "# Planned: fsdp2 on 2 ranks, 2 GiB of 10 GiB a rank, made."
    assert rest == RECIPE.replace("backend: ddp   #", "backend: fsdp2  #") and said == ""


def test_settings_the_plan_chose_are_written_with_a_comment(recipe: Path) -> None:
    chosen = row("zero2", 2, options={"overlap_comm": False}, footprint={"settings": {"reduce_bucket_size": 1234567}})
    text, changed, _ = written(recipe, chosen)
    assert changed["backend.options.reduce_bucket_size"] == 1234567
    assert "reduce_bucket_size: 1234567  # chosen by shardkit plan from the model" in text
    assert "backend:  # replicas\n  name: zero2\n  adapter: deepspeed\n" in text
    assert changed.keys() >= {"backend.name", "backend.adapter", "backend.options.stage"}
    assert all(key.startswith("backend.") for key in changed)


def test_recomputation_the_batch_and_the_processes_are_written(recipe: Path) -> None:
    planned = row("ddp", 2, recompute=True, world_size=3, note="another batch", accumulation=1)
    text, changed, _ = written(recipe, planned, processes=True)
    assert changed == {
        "activation_checkpointing": "blocks",
        "batch.global_batch_size": 12,
        "launch.nproc_per_node": 3,
    }
    assert "global_batch_size: 12  # the maths" in text and "micro_batch_size: 4     # the memory" in text


def test_where_a_smaller_micro_batch_fits_it_is_written(recipe: Path) -> None:
    text, changed, _ = written(recipe, row("ddp", 12, largest=2))
    assert changed == {"batch.micro_batch_size": 2} and "# Planned: ddp on 2 ranks, micro-batches of 2" in text


def test_settings_of_the_command_line_are_in_the_copy(recipe: Path) -> None:
    overrides = ("name=other: one", "train.max_steps=7", "backend.options.bucket_cap_mb=3", "model.bias=false")
    with pytest.raises(RequestError):
        written(recipe, row("ddp", 2), overrides=overrides)  # the name is refused by the recipe itself
    text, changed, said = written(recipe, row("ddp", 2), overrides=overrides[1:])
    assert changed == {} and said == "" and "max_steps: 7" in text and "# digits" in text


def test_options_of_the_command_line_are_written_for_a_backend_that_has_them(recipe: Path) -> None:
    overrides = ("backend.options.bucket_cap_mb=3",)
    text, _, said = written(recipe, row("fsdp2", 2), overrides=overrides)
    assert said == "" and "bucket_cap_mb" not in text and "fsdp2" in text


def test_nothing_is_written_where_nothing_fits_or_something_is_there(recipe: Path) -> None:
    with pytest.raises(RequestError, match="nothing to write"):
        written(recipe, row("ddp", 12, largest=0))
    written(recipe, row("ddp", 2))
    with pytest.raises(RequestError, match="is there already"):
        written(recipe, row("ddp", 2))
    assert sorted(path.name for path in recipe.parent.iterdir()) == ["deep", "mine.yaml"]


def test_a_copy_that_cannot_name_the_backend_as_the_recipe_does_is_written_resolved(recipe: Path) -> None:
    (recipe.parent / "own.yaml").write_text("adapter: ddp\noptions: {bucket_cap_mb: 7}\n")
    recipe.write_text(RECIPE.replace("backend: ddp", "backend: own.yaml"))
    text, changed, said = written(recipe, row("own", 2, recompute=True))
    assert changed == {"activation_checkpointing": "blocks"} and "could not be edited" in said
    assert text.startswith("# Planned: own (activation_checkpointing=blocks) on 2 ranks") and "bucket_cap_mb: 7" in text
