"""The sizes of ZeRO's buffers: chosen from the model, unless a recipe gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardkit.engines.anatomy import Anatomy, anatomy
from shardkit.engines.knobs import MOST, SMALL, chosen, resolved
from shardkit.engines.meaning import Situation
from shardkit.engines.options import DeepSpeedOptions
from shardkit.engines.zero import zero_meaning

WIDTH = 10


def stack(layers: int, width: int = WIDTH, *, recomputed: bool = False) -> Anatomy:
    """`layers` blocks of one matrix, and an embedding and a head of a half and a quarter of one."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(layers)]
        model = nn.Sequential(
            nn.Embedding(width // 2, width), nn.Sequential(*blocks), nn.Linear(width, width // 4, bias=False)
        )
    return anatomy(model, ["1.*"], recomputed=blocks[:1] if recomputed else ())


def test_sizes_are_chosen_from_the_model() -> None:
    # 100 elements a block, 50 and 20 in the rest.
    assert chosen(DeepSpeedOptions(stage=3), stack(4)) == {
        "reduce_bucket_size": 100,
        "stage3_param_persistence_threshold": 1,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 100,
        "stage3_max_reuse_distance": 0,
    }


def test_a_bucket_holds_a_tenth_of_what_is_trained_or_its_largest_parameter() -> None:
    # All of a small model, one matrix, 1 MiB, a tenth.
    for layers, width, size in ((2, 10, 270), (2, 1000, 10**6), (2, 400, SMALL), (40, 1000, 4_075_000)):
        assert chosen(DeepSpeedOptions(stage=1), stack(layers, width)) == {"reduce_bucket_size": size}


def test_matrices_are_gathered_ahead_where_blocks_are_large() -> None:
    sizes = chosen(DeepSpeedOptions(stage=3), stack(2, 1000))
    assert (sizes["stage3_prefetch_bucket_size"], sizes["stage3_max_live_parameters"]) == (10**5, 10**6)


def test_what_is_recomputed_stays_for_the_backward_of_its_block() -> None:
    assert resolved(DeepSpeedOptions(stage=3), stack(4, recomputed=True)).stage3_max_reuse_distance == 200


def test_nothing_larger_than_deepspeeds_own_is_chosen() -> None:
    large = stack(2, 40_000, recomputed=True)
    assert chosen(DeepSpeedOptions(stage=3), large) == MOST


def test_what_a_recipe_gives_is_left_as_it_is() -> None:
    given = DeepSpeedOptions(stage=3, reduce_bucket_size=3, stage3_max_reuse_distance=10**10)
    found = resolved(given, stack(4))
    assert (found.reduce_bucket_size, found.stage3_max_reuse_distance) == (3, 10**10)
    assert found.stage3_param_persistence_threshold == 1
    assert resolved(found, stack(40)) == found
    two = DeepSpeedOptions(stage=2)
    assert resolved(two, stack(4)) == replace(two, reduce_bucket_size=470)


def test_wrong_values_are_named() -> None:
    def keys(**given: int) -> list[str]:
        return [key for key, _ in DeepSpeedOptions(**given).check()]  # type: ignore[arg-type]

    assert keys(stage=3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0) == []
    assert keys(stage=3, stage3_max_reuse_distance=-1) == ["stage3_max_reuse_distance"]
    assert keys(stage=2, stage3_max_live_parameters=5) == ["stage3_max_live_parameters"]
    assert keys(reduce_bucket_size=0) == ["reduce_bucket_size"]
    assert keys() == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_explain_says_what_was_chosen(stage: int) -> None:
    situation = Situation(anatomy=stack(4), world_size=2, accumulation=1, precision="fp32", max_grad_norm=None)
    options = DeepSpeedOptions(stage=stage, stage3_max_live_parameters=7 if stage == 3 else None)  # type: ignore[arg-type]
    said = zero_meaning(situation, options).translated
    size = 100 if stage == 3 else 470
    chosen_here = f"zero_optimization.reduce_bucket_size={size}, chosen from the model"
    assert said["backend.options.reduce_bucket_size"] == chosen_here
    live = "zero_optimization.stage3_max_live_parameters=7" if stage == 3 else "not used in this stage"
    assert said["backend.options.stage3_max_live_parameters"] == live
