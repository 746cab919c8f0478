"""The recipes in recipes/ name models, data sets and losses that fit together."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch.utils.data import default_collate

from shardkit import shipped
from shardkit.losses import adapt
from shardkit.recipe.build import build, check_targets
from shardkit.recipe.load import load

NEEDS = {"digits-resnet": ["sklearn"], "hf-resnet": ["sklearn", "transformers"], "chars-gpt": []}


RECIPES = list(shipped.files("recipes"))
# Importing transformers takes seconds.
MARKED = [
    pytest.param(name, marks=pytest.mark.slow) if "transformers" in NEEDS.get(name, []) else name for name in RECIPES
]


def loaded(recipe: str, *overrides: str):
    return load(shipped.files("recipes")[recipe], overrides, options_of=lambda adapter: None)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_divide_into_micro_steps_at_world_sizes_1_2_and_4(recipe, world_size):
    of_world = loaded(recipe, f"launch.nproc_per_node={world_size}").recipe
    steps = of_world.gradient_accumulation_steps(world_size)
    assert steps * world_size * of_world.batch.micro_batch_size == of_world.batch.global_batch_size
    assert steps >= 2 or world_size == 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_open_with_their_command_and_an_override(recipe):
    comments = [line for line in shipped.files("recipes")[recipe].read_text().splitlines() if line.startswith("#")]
    commands = [line for line in comments if f"python -m shardkit.launch recipes/{recipe}.yaml" in line]
    assert len(commands) == 2
    assert "=" in commands[1]


@pytest.mark.parametrize("recipe", MARKED)
@torch.no_grad()
def test_the_model_of_a_recipe_starts_at_the_loss_of_a_guess(recipe):
    for package in NEEDS.get(recipe, []):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")
    whole = loaded(recipe)
    assert check_targets(whole) == []
    torch.manual_seed(whole.recipe.seed)
    model, loss = build(whole.recipe.model), adapt(build(whole.recipe.loss))
    for data in (whole.recipe.data.train, whole.recipe.data.eval):
        items = build(data)
        batch = default_collate([items[index] for index in range(8)])
        sums = loss.metrics(model, batch)
        total, count = (float(value) for value in sums["loss"])
        num_classes = 256 if recipe == "chars-gpt" else 10
        assert count == batch[1].numel() == float(loss.count(batch))
        assert total / count == pytest.approx(math.log(num_classes), rel=0.35)
        assert 0.0 <= float(sums["accuracy"][0]) <= count
