"""Parameter groups of a recipe, formed from names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit.errors import RequestError
from shardkit.optimizer import maker
from shardkit.recipe.schema import ParameterGroup

SGD = {"_target_": "torch.optim.SGD", "lr": 0.5, "weight_decay": 0.1}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_the_first_group_that_matches_wins_and_the_rest_comes_first() -> None:
    named = list(model().named_parameters())
    groups = [ParameterGroup("*.bias", {"weight_decay": 0.0}), ParameterGroup("1.*", {"lr": 0.25})]
    optimizer = maker(SGD, groups)(named)
    found = [([id(p) for p in g["params"]], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    of = {name: id(parameter) for name, parameter in named}
    assert found == [
        ([of["0.weight"]], 0.5, 0.1),
        ([of["0.bias"], of["1.bias"]], 0.5, 0.0),
        ([of["1.weight"]], 0.25, 0.1),
    ]


def test_without_groups_all_parameters_are_in_one() -> None:
    optimizer = maker(SGD, [])(list(model().named_parameters()))
    assert isinstance(optimizer, torch.optim.SGD)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]


@pytest.mark.parametrize(
    ("matches", "words"),
    [
        (["*.bais"], ["parameter_groups[0].match", "'*.bais'", "0.weight, 0.bias, 1.weight, 1.bias"]),
        (["*", "*.bias"], ["parameter_groups[1].match", "earlier group"]),
    ],
)
def test_a_group_without_parameters_is_an_error(matches: list[str], words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        maker(SGD, [ParameterGroup(match) for match in matches])(list(model().named_parameters()))
    assert all(word in str(error.value) for word in words)
