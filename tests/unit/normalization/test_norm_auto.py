"""What auto chooses, and that it says why in two sentences."""

from __future__ import annotations

import re

import pytest
from norm_nets import ResNet
from torch import nn

from shardkit.normalization import apply_policy, recommend
from shardkit.recipe.schema import Normalization
from shardkit.world import World

# world, micro-batch, accumulation, pretrained, positions -> policy, whether group is mentioned
CASES = [
    ((1, 128, 1, False, None), "keep", False),
    ((1, 4, 1, False, 49), "keep", True),
    ((4, 32, 1, False, None), "sync", False),
    ((4, 2, 1, False, 49), "sync", True),
    ((4, 4, 1, False, 49), "sync", False),
    ((1, 2, 64, False, None), "exact", False),
    ((4, 8, 4, True, 49), "exact", False),
    ((2, 16, 4, False, 1), "exact", False),
    ((2, 16, 4, False, 49), "deferred", False),
    ((1, 64, 4, False, None), "deferred", False),
    ((2, 1, 2, False, 49), "exact", True),
    ((2, 1, 2, True, 49), "frozen", False),
    ((1, 2, 1, True, 49), "frozen", False),
]


@pytest.mark.parametrize(("run", "policy", "group"), CASES)
def test_the_choice_and_its_reasons(run: tuple[int, int, int, bool, int | None], policy: str, group: bool) -> None:
    world, micro, accumulation, pretrained, positions = run
    chosen, explanation = recommend(
        ResNet(),
        world_size=world,
        micro_batch_size=micro,
        accumulation=accumulation,
        pretrained=pretrained,
        spatial_size=positions,
    )
    assert chosen == policy and ("policy group" in explanation) == group
    assert len(re.findall(r"\.(\s|$)", explanation)) == 2


def test_without_batch_norm_all_is_kept() -> None:
    for model in (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), nn.Linear(2, 2)):
        applied = apply_policy(model, Normalization(policy="auto"), world=World(), accumulation=8)
        assert applied.policy == "keep" and "no BatchNorm" in applied.explanation


def test_auto_applies_what_it_chose_and_rules_still_win() -> None:
    model = ResNet()
    rule = Normalization(policy="auto").rules
    assert rule == []
    applied = apply_policy(model, Normalization(policy="auto"), world=World(), micro_batch_size=4, accumulation=8)
    assert applied.policy == "exact" and {layer.mode for layer in applied.layers} == {"exact"}
    assert applied.explanation in applied.table().replace("\n", " ") and applied.to_json()["policy"] == "exact"
