"""What is recommended changes where it has to, when a device's memory is swept."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.engines import registry
from shardkit.planning.device import Device
from shardkit.planning.notes import notes
from shardkit.planning.plan import Models, Plan, Row, Wanted, needed, plan
from shardkit.planning.reason import reason
from shardkit.recipe.load import load

RECIPE = """
model: {_target_: shardkit.models.gpt.GPT, width: 64, layers: 6, heads: 2, context: 32}
data: {train: {_target_: shardkit.data.topics.Topics, split: train, context: 32}}
loss: {_target_: shardkit.losses.CrossEntropy, class_dim: -1}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-3}
batch: {global_batch_size: 8, micro_batch_size: 2}
train: {max_steps: 1}
backend: ddp
"""
DEVICE = Device(
    name="swept",
    memory=2**40,
    margin=0.1,
    reserved=1000,
    flops={"fp32": 1e12},
    memory_bandwidth=1e12,
    link_bandwidth=1e10,
    network_bandwidth=1e9,
    host_bandwidth=1e9,
)
# Written by hand: no more sharding than needed; then what is faster by these bandwidths.
LADDER = ["ddp", "zero1", "zero2", "fsdp2, reshard_after_forward=false", "fsdp2", "zero3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    path = tmp_path_factory.mktemp("thresholds") / "recipe.yaml"
    path.write_text(RECIPE)
    return Models(load(str(path), [], options_of=registry.options_of), "cuda")


def planned(models: Models, memory: int, world_sizes: tuple[int, ...] = (4,), backends: tuple[str, ...] = ()) -> Plan:
    device = replace(DEVICE, memory=memory)
    return plan(models.loaded, Wanted(device=device, world_sizes=world_sizes, backends=backends), models)


def test_the_recommendation_changes_exactly_where_a_choice_stops_fitting(models: Models) -> None:
    rows = [row for row in planned(models, 2**40).rows if row.needs is not None]
    assert len(rows) > 10
    told, memory = [], max(row.needs or 0 for row in rows)
    while True:
        found = planned(models, memory)
        if found.recommended is None:
            break
        needs = found.recommended.needs or 0
        told.append(found.recommended)
        # It fits to the last byte, and with one less another is recommended.
        assert planned(models, needs).recommended == replace(found.recommended, memory=needs)
        memory = needs - 1
    assert memory == min(row.needs or 0 for row in rows) - 1
    names = [row.choice.name for row in told]
    assert names[0] == "ddp" and len(set(names)) == len(names)
    ladder = [name for name in names if name in LADDER]
    assert ladder == [name for name in LADDER if name in names] and {"ddp", "zero1", "fsdp2"} <= set(ladder)
    assert "blocks" in names[-1], "the least memory takes recomputation"
    for row, after in itertools.pairwise(told):
        assert after.cost > row.cost and (after.needs or 0) < (row.needs or 0)


def test_the_first_row_that_fits_is_recommended_and_the_second_runs_up(models: Models) -> None:
    for row in planned(models, 2**40).rows[::3]:
        found = planned(models, row.needs or 0)
        fitting = [each for each in found.rows if each.fits]
        assert [found.recommended, found.runner_up] == ([*fitting, None, None])[:2]
        assert all((each.needs or 0) <= (row.needs or 0) for each in fitting)
        assert all((each.needs or 0) > (row.needs or 0) for each in found.rows if each.fits is False)


def test_fewer_ranks_come_before_more_where_they_fit(models: Models) -> None:
    # Without offload, for which one rank needs least.
    backends = ("single", "ddp", "fsdp2")

    def recommended(memory: int) -> Row:
        row = planned(models, memory, (1, 2, 4), backends).recommended
        assert row is not None
        return row

    roomy = recommended(2**40)
    assert roomy.choice.name == "single" and roomy.choice.world_size == 1
    least = {
        size: min(row.needs for row in planned(models, 2**40, (size,), backends).rows if row.needs is not None)
        for size in (1, 2, 4)
    }
    assert least[1] > least[2] > least[4]
    assert recommended(least[1]).choice.world_size == 1
    assert recommended(least[1] - 1).choice.world_size == 2
    assert recommended(least[2] - 1).choice.world_size == 4
    assert planned(models, least[4] - 1, (1, 2, 4), backends).recommended is None


def test_the_largest_micro_batch_fits_and_the_next_does_not(models: Models) -> None:
    (row, *_) = planned(models, 2**40, (1,), ("single",)).rows
    assert row.largest_micro_batch_size == 8 and row.micro_batch_size == 2
    (fits, *_) = planned(models, row.needs or 0, (1,), ("single",)).rows
    (smaller, *_) = planned(models, (row.needs or 0) - 1, (1,), ("single",)).rows
    assert [fits.fits, fits.largest_micro_batch_size] == [True, 2]
    assert [smaller.fits, smaller.largest_micro_batch_size] == [False, 1]


def test_one_micro_step_may_fit_where_two_smaller_ones_do_not(models: Models) -> None:
    # DistributedDataParallel sees no gradient before the last micro-step: they are memory beside its buckets.
    (row, *_) = planned(models, 2**40, (4,), ("ddp",)).rows
    assert row.accumulation == 1
    (fits, *_) = planned(models, row.needs or 0, (4,), ("ddp",)).rows
    (smaller, *_) = planned(models, (row.needs or 0) - 1, (4,), ("ddp",)).rows
    assert [fits.largest_micro_batch_size, smaller.largest_micro_batch_size] == [2, 0]


def test_where_nothing_fits_smaller_micro_steps_that_are_each_reduced_are_tried(models: Models) -> None:
    roomy = planned(models, 2**40, (4,), ("fsdp2",)).rows
    assert all(row.accumulation == 1 and "reduce_each" not in row.choice.name for row in roomy)
    found = planned(models, min(row.needs or 0 for row in roomy) - 1, (4,), ("fsdp2",))
    assert found.recommended is None and len(found.rows) == 2 * len(roomy)
    # Two micro-steps of one item keep gradients whole between them, unless they are reduced each time.
    fits = [row.choice.name for row in found.rows if row.largest_micro_batch_size]
    assert fits == ["fsdp2, reduce_each_micro_step=true, activation_checkpointing=blocks"]
    assert reason(found).beside == (
        "It fits with backend.options.reduce_each_micro_step=true batch.micro_batch_size=1."
    )


def test_more_memory_never_fits_less_and_more_ranks_never_need_more(models: Models) -> None:
    needs = {
        size: {row.choice.name: row.needs for row in planned(models, 2**40, (size,)).rows if row.needs is not None}
        for size in (2, 4, 8)
    }
    for name in set(needs[2]) & set(needs[4]) & set(needs[8]):
        assert needs[2][name] >= needs[4][name] >= needs[8][name], name


def test_an_engine_that_does_not_say_what_it_needs_is_neither_fitting_nor_recommended(models: Models) -> None:
    found = planned(models, 2**40, (2,), ("tests.third_party.engines:ManualEngine",))
    (row, *_) = found.rows
    assert row.unknown == "the adapter 'tests.third_party.engines:ManualEngine' does not say what it needs"
    assert row.fits is None and found.recommended is None and all(row.footprint is None for row in found.rows)


def test_what_has_to_be_whole_before_the_first_step_has_to_fit_too(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text(
        RECIPE.replace("width: 64", "width: 256").replace("context: 32", "context: 4").replace("AdamW", "SGD")
        + 'blocks: ["blocks.*"]\n'
    )
    wide = Models(load(str(path), [], options_of=registry.options_of), "cuda")
    whole = wide.of("none").built
    found = planned(wide, 2**40, (64,), ("fsdp2", "zero3", "accelerate-fsdp2", "zero2"))
    rows = {row.choice.name: row for row in found.rows if row.footprint is not None}
    for name in ("fsdp2", "zero3"):
        # A unit, or a parameter, becomes shards before the next is put onto the device.
        assert rows[name].footprint.loading < whole / 3 and rows[name].needs < whole
        assert rows[name].needs == needed(DEVICE, rows[name].footprint.peak)
    held = rows["accelerate-fsdp2"]
    assert held.footprint.peak < whole < held.footprint.loading
    assert held.needs == needed(DEVICE, held.footprint.loading)
    assert planned(wide, held.needs, (64,), ("accelerate-fsdp2",)).recommended is not None
    assert planned(wide, held.needs - 1, (64,), ("accelerate-fsdp2",)).recommended is None
    said = [note for note in notes(found, list(found.rows)) if note.startswith("More than a step needs")]
    assert len(said) == 1 and "accelerate-fsdp2 on 64 ranks" in said[0] and "zero3" not in said[0]


def test_evaluations_that_see_more_than_training_are_told_not_to_be_planned() -> None:
    for items, told in (("null", 0), (24, 0), (25, 1)):
        words = [f"evaluation.micro_batch_size={items}", "batch.micro_batch_size=24", "model.width=4"]
        loaded = load("digits-resnet", words, options_of=registry.options_of)
        found = plan(loaded, Wanted(device=DEVICE, world_sizes=(1,), backends=("single",)))
        said = [note for note in notes(found, list(found.rows)) if note.startswith("Not planned: evaluations")]
        assert len(said) == told and all(f"see {items} items of a rank" in note for note in said)
