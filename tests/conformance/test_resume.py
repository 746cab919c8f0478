"""A run that is stopped in the middle of an epoch and goes on elsewhere is the run that was not stopped."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = "recipes/digits-resnet.yaml"
RUN = "tests.conformance.run_ranks:run_recipe"
STEPS = 18
# An epoch of 1437 digits is 15 windows of 96.
FULL, ITEMS = 15, 1437
DIGITS = [
    "data.train._target_=tests.conformance.run_ranks.NumberedDigits",
    "data.train.noise=0.1",
    "data.eval._target_=tests.conformance.run_ranks.NumberedDigits",
    "loss._target_=tests.conformance.run_ranks.Ledger",
    "normalization.policy=exact",
    "batch.micro_batch_size=8",
    "model.width=4",
    f"train.max_steps={STEPS}",
]
Place = tuple[str, int]


def run(launch_ranks: Callable[..., list[Any]], place: Place, folder: Path, ledger: Path, *more: str) -> dict[str, Any]:
    backend, world = place
    overrides = [*DIGITS, f"backend={backend}", f"loss.path={ledger}", *more]
    return launch_ranks(world, RUN, RECIPE, overrides, str(folder))[0]


def seen(ledger: Path) -> list[int]:
    """The numbers of all items all ranks trained on."""
    return [int(n) for path in ledger.parent.glob(f"{ledger.name}-*") for n in path.read_text().split()]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(("zero2", 2), ("fsdp2", 1), id="zero2-fsdp2"),
        pytest.param(("fsdp2", 2), ("zero3", 3), id="fsdp2-zero3", marks=pytest.mark.slow),
        pytest.param(("zero2", 3), ("fsdp2", 4), id="zero2-fsdp2-4", marks=pytest.mark.slow),
        pytest.param(("accelerate-zero3", 2), ("ddp", 4), id="accelerate", marks=pytest.mark.slow),
    ],
)
def test_a_stop_in_the_middle_of_an_epoch_changes_nothing(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, source: Place, target: Place
) -> None:
    stop = random.randrange(2, FULL - 1)
    print("stopped at step", stop)
    whole = run(launch_ranks, target, tmp_path / "whole", tmp_path / "all")
    assert not whole["stopped"] and len(whole["losses"]) == STEPS
    first = run(
        launch_ranks, source, tmp_path / "run", tmp_path / "before", f"train.stop_at_step={stop}", "data.num_workers=2"
    )
    assert first["stopped"] and max(first["losses"]) == stop
    assert first["lines"][-1]["status"] == "stopped" and first["lines"][-1]["resumable"] is True
    second = run(launch_ranks, target, tmp_path / "run", tmp_path / "after", "data.num_workers=2")
    assert second["losses"].keys() == whole["losses"].keys()
    # Measured: 1e-7 at every step, zero2 -> fsdp2 and fsdp2 -> zero3; sums over other ranks are rounded otherwise.
    for step, loss in whole["losses"].items():
        assert second["losses"][step] == pytest.approx(loss, rel=2e-6), f"step {step}, stopped at {stop}"
    assert second["evals"][STEPS]["loss"] == pytest.approx(whole["evals"][STEPS]["loss"], rel=1e-4)
    # Each item once in the epoch that was cut, and the beginning of the next.
    counted = Counter(seen(tmp_path / "before")) + Counter(seen(tmp_path / "after"))
    rest = (STEPS - FULL) * 96
    assert set(counted) == set(range(ITEMS)) and sum(counted.values()) == ITEMS + rest
    assert sum(count == 2 for count in counted.values()) == rest
    assert counted == Counter(seen(tmp_path / "all"))


SMALL = [
    "model.width=4",
    "batch.micro_batch_size=24",
    "train.max_steps=8",
    "evaluation.every=2",
    "checkpoint.every=null",
    "checkpoint.keep_best=null",
]
SOME: list[Any] = [("ddp", 2), *(pytest.param((name, 2), marks=pytest.mark.slow) for name in ("fsdp2", "zero3"))]


def small(launch_ranks: Callable[..., list[Any]], place: Place, folder: Path, *more: str, errors: bool = False) -> Any:
    backend, world = place
    overrides = [*SMALL, f"backend={backend}", *more]
    return launch_ranks(world, RUN, RECIPE, overrides, str(folder), errors=errors)[0]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def test_a_run_keeps_the_newest_and_the_best(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    best = ["checkpoint.every=1", "checkpoint.keep_best=eval/accuracy", "checkpoint.export=true"]
    run = small(launch_ranks, ("ddp", 2), tmp_path, *best)
    scores = {step: line["accuracy"] for step, line in run["evals"].items()}
    top = max(scores, key=lambda step: (scores[step], -step))
    assert steps_in(tmp_path) == sorted({7, 8, top})
    assert [line["step"] for line in run["lines"] if line["kind"] == "checkpoint"] == list(range(1, 9))
    # The same recipe again: there is nothing left to do, and nothing is lost.
    again = small(launch_ranks, ("fsdp2", 2), tmp_path, *best)
    assert again["losses"] == run["losses"] and again["lines"][-1]["status"] == "completed"
    # What was exported is the bare model's state dict.
    from safetensors.torch import load_file

    from shardkit.models.resnet import ResNet

    newest = tmp_path / "checkpoints" / "step-00000008" / "model.safetensors"
    ResNet(depth=8, in_channels=1, num_classes=10, width=4).load_state_dict(load_file(newest), strict=True)


def test_saving_in_the_background_or_by_the_clock_changes_no_loss(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    plain = small(launch_ranks, ("zero2", 2), tmp_path / "plain")
    clock = "checkpoint.every_minutes=0.000001"
    behind = small(launch_ranks, ("zero2", 2), tmp_path / "behind", clock, "checkpoint.asynchronous=true")
    assert behind["losses"] == plain["losses"] and steps_in(tmp_path / "behind") == [7, 8]
    assert not (tmp_path / "plain" / "checkpoints").exists()


def test_going_on_from_an_earlier_checkpoint_sets_later_ones_aside(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    keep = ["checkpoint.every=2", "checkpoint.keep_last=null"]
    first = small(launch_ranks, ("ddp", 2), tmp_path, *keep)
    again = small(
        launch_ranks,
        ("ddp", 2),
        tmp_path,
        *keep,
        f"checkpoint.resume={tmp_path}/checkpoints/step-00000004",
        "train.stop_at_step=6",
    )
    assert steps_in(tmp_path) == [2, 4, 6] and max(again["losses"]) == 6
    assert again["losses"] == {step: loss for step, loss in first["losses"].items() if step <= 6}
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("superseded-*")) == [
        "superseded-step-00000006",
        "superseded-step-00000008",
    ]


@pytest.mark.parametrize("place", SOME, ids=str)
def test_a_run_starts_with_weights_from_elsewhere(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, place: Place
) -> None:
    import torch
    from safetensors.torch import save_file

    from shardkit.models.resnet import ResNet

    torch.manual_seed(5)
    model = ResNet(depth=8, in_channels=1, num_classes=10, width=4)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    start = small(
        launch_ranks,
        place,
        tmp_path / "run",
        f"init_from={tmp_path}/weights.safetensors",
        "seed=7",
        "checkpoint.every=4",
    )
    plain = small(launch_ranks, place, tmp_path / "plain", "seed=7")
    assert abs(start["losses"][1] - plain["losses"][1]) > 1e-3
    # A checkpoint of the run, weights alone: the loss goes on, the schedule and the data begin anew.
    more = small(launch_ranks, place, tmp_path / "more", f"init_from={tmp_path}/run/checkpoints", "seed=7")
    assert min(more["losses"]) == 1 and more["losses"][1] < start["losses"][1] - 1e-3
    # Weights of one file, whatever the backend and the seed of the model.
    other = small(
        launch_ranks, ("single", 1), tmp_path / "single", f"init_from={tmp_path}/weights.safetensors", "seed=7"
    )
    assert start["losses"][1] == pytest.approx(other["losses"][1], rel=1e-6)


def test_a_model_that_differs_is_refused_on_all_ranks(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    small(launch_ranks, ("ddp", 2), tmp_path, "train.stop_at_step=2")
    kind, message, _ = small(launch_ranks, ("fsdp2", 2), tmp_path, "model.width=5", errors=True)
    assert kind == "CheckpointError" and "stem.0.weight has the shape (5, 1, 3, 3) here and (4, 1, 3, 3)" in message
    kind, message, _ = small(launch_ranks, ("fsdp2", 2), tmp_path, "normalization.policy=group", errors=True)
    assert kind == "CheckpointError" and "was BatchNorm2d and is GroupNorm" in message
    kind, message, _ = small(launch_ranks, ("ddp", 2), tmp_path, "checkpoint.resume=never", errors=True)
    assert (
        kind == "CheckpointError" and "holds checkpoints of an earlier run, and checkpoint.resume is never" in message
    )


def test_runs_that_share_a_folder_of_checkpoints_do_not_share_checkpoints(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    shared = [f"checkpoint.folder={tmp_path}/all", "checkpoint.every=4"]
    first = small(launch_ranks, ("ddp", 2), tmp_path / "one", *shared, "train.stop_at_step=4")
    other = small(launch_ranks, ("ddp", 2), tmp_path / "two", *shared, "optimizer.lr=0.05")
    assert min(other["losses"]) == 1 and other["losses"][2] != first["losses"][2]
    again = small(launch_ranks, ("ddp", 2), tmp_path / "one", *shared)
    assert [line["step"] for line in again["lines"] if line["kind"] == "resume"] == [4]
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["one", "two"]


def test_a_stop_whose_checkpoint_cannot_be_written_is_no_stop_to_go_on_from(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    elsewhere = f"checkpoint.folder={tmp_path}/file"
    kind, message, _ = small(launch_ranks, ("ddp", 2), tmp_path / "run", elsewhere, "train.stop_at_step=2", errors=True)
    assert kind == "CheckpointError" and "checkpoints cannot be saved: rank 0: Not a directory" in message


def test_another_metric_begins_a_best_of_its_own(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    best = ["checkpoint.keep_last=1", "checkpoint.every=2"]
    small(launch_ranks, ("ddp", 2), tmp_path, *best, "checkpoint.keep_best=eval/loss", "train.stop_at_step=4")
    run = small(launch_ranks, ("ddp", 2), tmp_path, *best, "checkpoint.keep_best=eval/accuracy")
    scores = {step: line["accuracy"] for step, line in run["evals"].items() if step > 4}
    top = max(scores, key=lambda step: (scores[step], -step))
    assert steps_in(tmp_path) == sorted({8, top})


def test_weights_of_a_damaged_checkpoint_are_not_started_from(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    small(launch_ranks, ("zero3", 2), tmp_path, "train.stop_at_step=2")
    shard = tmp_path / "checkpoints" / "step-00000002" / "shard-00000-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-200] ^= 1
    shard.write_bytes(data)
    source = f"init_from={tmp_path}/checkpoints/step-00000002"
    kind, message, _ = small(launch_ranks, ("ddp", 2), tmp_path / "other", source, errors=True)
    assert kind == "CheckpointError" and f"{shard.name} is damaged: its crc32" in message


@pytest.mark.parametrize(
    "place",
    [("zero2", 2), *(pytest.param((name, 2), marks=pytest.mark.slow) for name in ("ddp", "fsdp2", "zero3"))],
    ids=str,
)
def test_a_save_in_the_background_holds_the_same_bytes(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, place: Place
) -> None:
    """Also the moments, which are copied while the next window runs."""
    from shardkit.checkpoint.difference import difference
    from shardkit.checkpoint.place import one

    every = ["checkpoint.every=1", "checkpoint.keep_last=null", "model.width=16", "train.max_steps=5"]
    small(launch_ranks, place, tmp_path / "once", *every)
    small(launch_ranks, place, tmp_path / "behind", *every, "checkpoint.asynchronous=true")
    assert steps_in(tmp_path / "behind") == [1, 2, 3, 4, 5]
    for step in steps_in(tmp_path / "once"):
        a, b = (one(f"{tmp_path}/{run}/checkpoints/step-{step:08d}") for run in ("once", "behind"))
        found = difference(a, b)
        assert not found.any and found.compared > 60, found


def test_what_a_run_left_out_of_its_start_is_not_left_out_of_its_own_checkpoints(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    began = ["checkpoint.every=2", "checkpoint.keep_last=null"]
    small(launch_ranks, ("ddp", 2), tmp_path / "source", *began, "train.stop_at_step=4")
    tuned = ["load.exclude=['head.*']", "checkpoint.every=2", "seed=5", f"init_from={tmp_path / 'source'}"]
    whole = small(launch_ranks, ("ddp", 2), tmp_path / "whole", *tuned)
    small(launch_ranks, ("ddp", 2), tmp_path / "run", *tuned, "train.stop_at_step=4")
    again = small(launch_ranks, ("ddp", 2), tmp_path / "run", *tuned)
    assert again["losses"] == whole["losses"]
    # Nor where it began from the whole state of a checkpoint: the same command goes on from what it has made since.
    resumed = [
        *began,
        "load.exclude=['head.*']",
        f"checkpoint.resume={tmp_path / 'source' / 'checkpoints' / 'step-00000002'}",
    ]
    whole = small(launch_ranks, ("ddp", 2), tmp_path / "other", *resumed)
    small(launch_ranks, ("ddp", 2), tmp_path / "again", *resumed, "train.stop_at_step=6")
    again = small(launch_ranks, ("ddp", 2), tmp_path / "again", *resumed)
    assert again["losses"] == whole["losses"] and sorted(again["losses"]) == [3, 4, 5, 6, 7, 8]
    assert not list((tmp_path / "again" / "checkpoints").glob("superseded-*"))
    # Where all it has made is damaged, the path is the way out.
    for manifest in (tmp_path / "again" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{")
    assert sorted(small(launch_ranks, ("ddp", 2), tmp_path / "again", *resumed, "train.stop_at_step=4")["losses"]) == [
        3,
        4,
    ]


def test_a_run_does_not_go_on_from_another_whose_folder_has_its_name(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def run(name: str, *more: str, errors: bool = False) -> Any:
        words = [f"checkpoint.folder={tmp_path / 'kept'}", "checkpoint.every=4", f"run_dir={name}/seed0", *more]
        return small(launch_ranks, ("ddp", 2), tmp_path / name / "seed0", *words, errors=errors)

    run("one", "train.stop_at_step=4")
    said = str(run("two", errors=True))
    assert "holds the checkpoints of run_dir=one/seed0, and this run is two/seed0" in said
    assert "checkpoint.resume=" in said
    asked = run("two", f"checkpoint.resume={tmp_path / 'kept' / 'seed0'}", "train.stop_at_step=5")
    assert sorted(asked["losses"]) == [5]


def test_what_begins_beside_stepped_parameters_has_a_group_of_its_own_on_zero(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    adam = ["optimizer={_target_: torch.optim.AdamW, lr: 0.01}", "checkpoint.every=4"]
    small(launch_ranks, ("ddp", 2), tmp_path, *adam, "train.stop_at_step=4")
    without = [*adam, "load.exclude=['head.*']", "train.stop_at_step=6"]
    said = str(small(launch_ranks, ("zero1", 2), tmp_path, *without, errors=True))
    assert "parameter group 0: head.weight, head.bias would begin without state" in said and "parameter_groups" in said
    own = ["parameter_groups=[{match: 'head.*', options: {weight_decay: 0.01}}]", "load.groups=recipe"]
    found = {}
    for name in ("ddp", "zero1"):
        copied = tmp_path.parent / f"{tmp_path.name}-{name}"
        shutil.copytree(tmp_path, copied)
        found[name] = small(launch_ranks, (name, 2), copied, *without, *own)["losses"]
    assert found["zero1"] == pytest.approx(found["ddp"], rel=2e-6)


def test_weights_of_one_norm_do_not_start_another(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    small(launch_ranks, ("ddp", 2), tmp_path / "batch", "checkpoint.every=4", "train.stop_at_step=4")
    start = [f"init_from={tmp_path / 'batch'}", "normalization.policy=group", "load.strict=false"]
    said = str(small(launch_ranks, ("ddp", 2), tmp_path / "group", *start, errors=True))
    assert "trained with policy keep, this run has policy group" in said and "load.exclude" in said
    left = "load.exclude=['*.[14].*', 'stages.*.shortcut.1.*']"
    small(launch_ranks, ("ddp", 2), tmp_path / "group", *start, left, "train.stop_at_step=1")
