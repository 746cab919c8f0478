from __future__ import annotations

from dataclasses import replace

from shardkit.planning.nearest import nearest
from shardkit.planning.reason import reason
from tests.unit.planning.rows import DEVICE, GIB, plan_of, row

ROOMY = replace(DEVICE, name="roomy", memory=40 * GIB)
HUGE = replace(DEVICE, name="huge", memory=80 * GIB)


def test_the_cheaper_ones_are_named_with_what_they_lack() -> None:
    found = reason(
        plan_of(
            row("first", 14, rung=1),
            row("second", 12, rung=2),
            row("third", 8, rung=3),
            row("fourth", 7, rung=4, seconds=1.5, moved=3 * GIB),
        )
    )
    assert found.why == (
        "third on 2 ranks is the cheapest that fits: it needs 8 GiB of 10 GiB, while first would need 14 GiB "
        "(4 GiB over) and second would need 12 GiB (2 GiB over)."
    )
    assert found.beside == (
        "The runner-up, fourth, needs 7 GiB and takes an estimated 1.5 times as long a step (1.5 s instead of 1 s) and "
        "moves 3 GiB a step instead of 1 GiB."
    )


def test_the_first_of_the_ladder_needs_no_excuse() -> None:
    found = reason(plan_of(row("first", 4)))
    assert found.why.startswith(
        "first on 2 ranks is the cheapest that fits: it needs 4 GiB of 10 GiB, and it comes first"
    )
    assert found.beside == "Nothing else fits."


def test_what_is_not_known_is_not_called_dearer() -> None:
    found = reason(plan_of(row("dark", None, rung=0), row("first", 4)))
    assert "the cheapest that is known to fit" in found.why
    assert "of no backend is it known" in reason(plan_of(row("dark", None))).why


def test_where_all_refuse_that_is_told() -> None:
    refuses = replace(row("first", None), unknown="", refused="not this one")
    assert reason(plan_of(refuses)).why == "Nothing is recommended: every backend refuses the recipe."
    assert "of no backend is it known" in reason(plan_of(refuses, row("dark", None))).why


def test_what_is_needed_without_activations_is_at_least_needed() -> None:
    dark = replace(row("dark", None, rung=0), needs=12 * GIB, fits=False)
    found = reason(plan_of(dark), [ROOMY])
    assert found.why == "Nothing fits: the nearest, dark on 2 ranks, needs at least 12 GiB of 10 GiB."
    assert found.beside == "" and found.nearest is None
    assert "dark would need at least 12 GiB (2 GiB over)" in reason(plan_of(dark, row("first", 4))).why
    short = row("first", 14, largest=0)
    found = reason(plan_of(dark, short), [ROOMY])
    assert found.why.startswith("Nothing fits: the nearest, first on 2 ranks, needs 14 GiB")
    assert found.beside == "It fits on devices of 14 GiB or more, as roomy."


def test_recomputing_what_fits_is_no_runner_up() -> None:
    plan = plan_of(row("first", 4), row("first", 3, recompute=True))
    assert reason(replace(plan, runner_up=None)).beside == "Nothing else fits, but with recomputed activations."


def test_no_more_than_three_are_told() -> None:
    rows = [row(f"no{number}", 12 + number, rung=number) for number in range(5)]
    found = reason(plan_of(*rows, row("yes", 1, rung=5)))
    assert found.why.count("would need") == 3 and "; 2 more that would be cheaper do not fit either." in found.why


def test_a_byte_decides() -> None:
    exactly = row("first", 10)
    assert exactly.fits and reason(plan_of(exactly)).why.startswith("first on 2 ranks")
    over = row("first", 10, footprint={"peak": 10 * GIB + 1})
    assert replace(over, needs=10 * GIB + 1, fits=False) not in [exactly]
    found = reason(plan_of(replace(over, needs=10 * GIB + 1, fits=False, largest_micro_batch_size=0)))
    assert "needs 10 GiB of 10 GiB, 1 B too much" in found.why


def test_a_smaller_micro_batch_is_the_nearest() -> None:
    short = row("first", 12, largest=2)
    found = nearest(plan_of(short, row("first", 8, recompute=True)), short)
    assert found and found.overrides == ("batch.micro_batch_size=2",) and found.micro_batch_size == 2
    assert found.says == "with batch.micro_batch_size=2"


def test_then_recomputed_activations_then_another_backend() -> None:
    short = row("first", 12, largest=0)
    again, other = row("first", 8, recompute=True), row("second", 7, rung=2)
    found = nearest(plan_of(short, again, other), short)
    assert found and found.row == again and found.overrides == ("activation_checkpointing=blocks",)
    assert found.says == "with activation_checkpointing=blocks (needs 8 GiB)"
    found = nearest(plan_of(short, other), short)
    assert found and found.overrides == ("backend=second",) and found.says == "with backend=second (needs 7 GiB)"


def test_then_both_with_a_smaller_micro_batch_then_more_ranks_then_another_device() -> None:
    short = row("first", 12, largest=0)
    found = nearest(plan_of(short, row("second", 11, rung=2, largest=1)), short)
    assert found and found.overrides == ("backend=second", "batch.micro_batch_size=1")
    wider, else_wider = row("first", 9, world_size=8), row("zeroth", 9, world_size=4)
    found = nearest(plan_of(short, wider, else_wider), short)
    assert found and found.world_size == 8 and found.says == "on 8 ranks (needs 9 GiB)"
    found = nearest(plan_of(short), short, [HUGE, ROOMY])
    assert found and found.memory == 12 * GIB and found.says == "on devices of 12 GiB or more, as roomy"
    found = nearest(plan_of(short, row("second", 11, rung=2, largest=0)), short, [HUGE, ROOMY])
    assert found and found.says == "on devices of 11 GiB or more, as roomy with backend=second"


def test_a_row_that_should_have_fitted_is_given_what_needs_less() -> None:
    ran_out = row("first", 9, largest=4, micro_batch_size=4, accumulation=3)
    found = nearest(plan_of(ran_out), ran_out)
    assert found and found.overrides == ("batch.micro_batch_size=3",)
    ran_out = row("first", 9, largest=1, micro_batch_size=1)
    assert nearest(plan_of(ran_out, row("second", 9.5, rung=2)), ran_out) is None
    found = nearest(plan_of(ran_out, row("second", 6, rung=2)), ran_out)
    assert found and found.overrides == ("backend=second",)


def test_nothing_fits_and_by_how_much() -> None:
    found = reason(plan_of(row("first", 20, largest=0), row("second", 12, rung=2, largest=2)), [ROOMY])
    assert found.why == "Nothing fits: the nearest, second on 2 ranks, needs 12 GiB of 10 GiB, 2 GiB too much."
    assert found.beside == "It fits with batch.micro_batch_size=2." and found.nearest is not None
    assert found.nearest.overrides == ("backend=second", "batch.micro_batch_size=2")
    found = reason(plan_of(row("second", 12, largest=0)), [])
    assert found.beside == "It fits on devices of 12 GiB or more."
