"""Where a run stands: its position in the data, its schedule, and what has changed since it was saved."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from shardkit.checkpoint.encoding import decode, encode
from shardkit.checkpoint.training import Position, check_norms, position_in, restore_scheduler, training_state
from shardkit.data.order import GlobalOrder
from shardkit.errors import CheckpointError
from shardkit.loop import total_steps
from shardkit.recipe.schema import Train


def order(**more: Any) -> GlobalOrder:
    return GlobalOrder(**{"num_items": 20, "global_batch_size": 8, **more})


def kept(position: Position, order: GlobalOrder, scheduler: Any = None) -> dict[str, Any]:
    """As it comes out of a manifest."""
    state = training_state(
        position,
        order,
        scheduler=scheduler,
        normalization={"policy": "keep", "rows": []},
        seed=0,
        world_size=1,
        best=None,
        recipe={},
    )
    return decode(json.loads(json.dumps({key: encode(value) for key, value in state.items()}, allow_nan=False)))


def test_a_position_walks_over_the_windows_of_an_epoch() -> None:
    walk, position = [], Position()
    for _ in range(4):
        position = position.after(order())
        walk.append((position.step, position.epoch, position.samples))
    assert walk == [(1, 0, 8), (2, 0, 16), (3, 1, 0), (4, 1, 8)]
    dropping = Position(step=1, samples=8).after(order(drop_last=True))
    assert dropping == Position(step=2, epoch=1)


def test_a_position_goes_on_where_it_was() -> None:
    position = Position(step=5, epoch=1, samples=16)
    assert position_in(kept(position, order()), order()) == (position, [])


def test_another_global_batch_goes_on_at_the_same_sample_and_is_told() -> None:
    found, notes = position_in(kept(Position(step=1, samples=8), order()), order(global_batch_size=5))
    assert found == Position(step=1, samples=8)
    assert len(notes) == 1 and "the global batch size is 5 and was 8" in notes[0] and "sample 8" in notes[0]
    windows = [list(w) for w in order(global_batch_size=5, shuffle=False).windows(0, 8)]
    assert windows == [list(range(8, 13)), list(range(13, 18)), [18, 19]]
    # What is left is no full window: the next epoch begins.
    found, _ = position_in(
        kept(Position(step=2, samples=16), order()), order(global_batch_size=6, drop_last=True, num_items=20)
    )
    assert found == Position(step=2, epoch=1)


@pytest.mark.parametrize("change", [{"num_items": 21}, {"seed": 1}, {"shuffle": False}])
def test_another_order_in_mid_epoch_is_refused(change: dict[str, Any]) -> None:
    saved = kept(Position(step=1, samples=8), order())
    with pytest.raises(CheckpointError, match=r"at sample 8 of epoch 0.*items would be seen twice or never"):
        position_in(saved, order(**change))
    # Between two epochs it is only told.
    _, notes = position_in(kept(Position(step=3, epoch=1), order()), order(**change))
    assert len(notes) == 1 and "the order of samples is another from here on" in notes[0]


def test_the_steps_of_a_run_count_from_where_it_stands() -> None:
    epochs = Train(max_epochs=3)
    assert total_steps(epochs, order(), Position()) == 9
    assert total_steps(epochs, order(), Position(step=4, epoch=1, samples=8)) == 9
    assert total_steps(epochs, order(), Position(step=9, epoch=3)) == 9
    # Windows of another size from here on: 12 items are left of epoch 1, and epoch 2.
    assert total_steps(epochs, order(global_batch_size=4), Position(step=4, epoch=1, samples=8)) == 4 + 3 + 5
    assert total_steps(Train(max_steps=7), order(), Position(step=4, epoch=1, samples=8)) == 7


def optimizer(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def lambda_lr(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1))


def sequential(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], milestones=[3]
    )


SCHEDULERS = [
    lambda_lr,
    sequential,
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    lambda o: lr_scheduler.PolynomialLR(o, 10),
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]),
]


@pytest.mark.parametrize("build", SCHEDULERS, ids=range(len(SCHEDULERS)))
@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_schedules_go_on(build: Any, stop: int) -> None:
    whole, first, second = optimizer(), optimizer(), optimizer()
    rates = []
    for made, steps in ((whole, 12), (first, stop)):
        scheduler = build(made)
        for _ in range(steps):
            made.step()
            scheduler.step()
            if made is whole:
                rates.append(made.param_groups[0]["lr"])
    saved = kept(Position(step=stop), order(), scheduler)["scheduler"]
    again = build(second)
    for key in ("lr", "initial_lr"):
        second.param_groups[0][key] = first.param_groups[0][key]
    assert restore_scheduler(again, saved, second, replay=False, step=3) == []
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    after = []
    for _ in range(stop, 12):
        second.step()
        again.step()
        after.append(second.param_groups[0]["lr"])
    assert after == rates[stop:]


def test_another_scheduler_is_refused_and_other_settings_are_told() -> None:
    o = optimizer()
    saved = kept(Position(step=3), order(), lr_scheduler.StepLR(o, 2))["scheduler"]
    with pytest.raises(CheckpointError, match=r"scheduler is .*StepLR, and this run's .*ExponentialLR"):
        restore_scheduler(lr_scheduler.ExponentialLR(optimizer(), 0.9), saved, o, replay=False, step=3)
    notes = restore_scheduler(lr_scheduler.StepLR(optimizer(), 7), saved, optimizer(), replay=False, step=3)
    assert len(notes) == 1 and "step_size is 2 in the checkpoint and goes on, the recipe's 7 does not hold" in notes[0]
    assert "this recipe has no learning rate scheduler" in restore_scheduler(None, saved, o, replay=False, step=3)[0]
    assert restore_scheduler(None, None, o, replay=False, step=3) == []


def test_changed_settings_are_told_whatever_the_scheduler_shows_of_them() -> None:
    def told(scheduler: Any, was: dict[str, Any], now: dict[str, Any]) -> list[str]:
        saved = kept(Position(step=3), order(), scheduler)["scheduler"]
        return restore_scheduler(scheduler, saved, optimizer(), replay=False, step=3, settings=(was, now))

    # Its milestones are a Counter in the scheduler's state.
    scheduler = lr_scheduler.MultiStepLR(optimizer(), [8, 10])
    (note,) = told(scheduler, {"milestones": [6, 9]}, {"milestones": [8, 10]})
    assert note.startswith("scheduler: milestones was [6, 9] and is [8, 10]; the checkpoint's goes on (load.groups")
    assert told(scheduler, {"milestones": [6, 9]}, {"milestones": [6, 9]}) == []
    (note,) = told(lr_scheduler.LambdaLR(optimizer(), lambda step: 0.5), {"lr_lambda": "a.b"}, {"lr_lambda": "a.c"})
    assert "does not hold functions, so the recipe's hold from here on" in note


@pytest.mark.parametrize("sequential", [False, True])
def test_a_schedule_that_the_checkpoint_had_not_begins_at_its_own_first_rate(sequential: bool) -> None:
    def build(made: torch.optim.Optimizer) -> Any:
        warm = lr_scheduler.LinearLR(made, start_factor=0.1, total_iters=4)
        return lr_scheduler.SequentialLR(made, [warm, lr_scheduler.StepLR(made, 9)], [5]) if sequential else warm

    def rates(made: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for _ in range(6):
            found.append(made.param_groups[0]["lr"])
            made.step()
            scheduler.step()
        return found

    fresh, resumed = optimizer(), optimizer()
    first, again = build(fresh), build(resumed)
    resumed.param_groups[0]["lr"] = 0.1  # as restoring the optimizer's options does
    (note,) = restore_scheduler(again, None, resumed, replay=False, step=3)
    assert "the recipe's begins here (load.groups=recipe takes it as of step 3)" in note
    assert rates(resumed, again) == rates(fresh, first)
    # As of the step, where the recipe's is asked for.
    other = optimizer()
    assert restore_scheduler(build(other), None, other, replay=True, step=3) == []
    assert other.param_groups[0]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 * 3 / 4))


def test_the_recipes_schedule_can_be_taken_at_the_saved_step() -> None:
    o = optimizer()
    was = lr_scheduler.StepLR(o, 2)
    for _ in range(5):
        o.step()
        was.step()
    saved = kept(Position(step=5), order(), was)["scheduler"]
    other = optimizer()
    restore_scheduler(lr_scheduler.ExponentialLR(other, 0.5), saved, other, replay=True, step=5)
    assert other.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)


def report(policy: str, **layers: str) -> dict[str, Any]:
    rows = [{"names": [name], "old": "BatchNorm2d", "new": new, "why": ""} for name, new in layers.items()]
    return {"policy": policy, "rows": rows}


def test_norms_of_another_kind_are_refused_with_a_sentence() -> None:
    before = report("sync", stem="BatchNorm(sync)", head="BatchNorm(sync)")
    assert check_norms(before, before) == []
    (note,) = check_norms(before, report("exact", stem="BatchNorm(exact)", head="BatchNorm(exact)"))
    assert "the policy was sync and is exact" in note
    with pytest.raises(CheckpointError, match=r"stem was BatchNorm\(sync\) and is GroupNorm\(8\)"):
        check_norms(before, report("group", stem="GroupNorm(8)", head="BatchNorm(sync)"))
    with pytest.raises(CheckpointError, match=r"stem was GroupNorm\(8\) and is GroupNorm\(4\)"):
        check_norms(report("group", stem="GroupNorm(8)"), report("group", stem="GroupNorm(4)"))


VALUES = [
    None,
    True,
    7,
    -0.0,
    1e-300,
    math.inf,
    -math.inf,
    "text",
    [1, [2.5]],
    (0.9, 0.999),
    {"a": {"b": (1,)}},
    {3: "three", (1, 2): "pair"},
    {"!tuple": 1},
    Counter({30: 1, 60: 2}),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert back == value and type(back) is type(value)


def test_small_tensors_nan_and_numpy_numbers_come_back() -> None:
    import numpy as np

    back = decode(json.loads(json.dumps(encode([torch.tensor(3.3), torch.tensor([1, 2]), math.nan, np.float64(2.5)]))))
    assert torch.equal(back[0], torch.tensor(3.3)) and back[1].dtype == torch.int64 and back[1].tolist() == [1, 2]
    assert math.isnan(back[2]) and back[3] == 2.5
    assert decode(encode(torch.tensor(math.inf))).item() == math.inf


@pytest.mark.parametrize("value", [object(), lambda: 1, {1, 2}, b"bytes", print])
def test_what_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"here is a .*cannot be stored without a pickle"):
        encode(value, "here")


def test_a_checkpoint_that_says_nothing_of_the_data_begins_them_anew() -> None:
    position, notes = position_in({"step": 7, "imported": {}}, order())
    assert position == Position(step=7) and "the data begin anew" in notes[0]
    assert check_norms(None, report("keep")) == []
