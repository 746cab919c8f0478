"""The global order and how windows are cut into cells."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from shardkit.data.order import GlobalOrder, cut, rank_cells, stream_seed
from shardkit.errors import DataError

WORLDS = (1, 2, 3, 4, 8)
SHAPES = list(itertools.product((1, 2, 3, 5, 7, 16, 33, 100), WORLDS, (1, 2, 3), (1, 2, 4)))


def cells_of_epoch(order: GlobalOrder, epoch: int, world: int, micro: int) -> list[list[list[list[int]]]]:
    """[window][rank][micro-step] -> items."""
    return [
        [
            [list(cell) for cell in rank_cells(window, world_size=world, rank=rank, micro_batch_size=micro)]
            for rank in range(world)
        ]
        for window in order.windows(epoch)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_seen_exactly_once_an_epoch(shuffle):
    for n, world, steps, micro in SHAPES:
        order = GlobalOrder(num_items=n, global_batch_size=world * steps * micro, shuffle=shuffle)
        cells = cells_of_epoch(order, 3, world, micro)
        seen = Counter(item for window in cells for rank in window for cell in rank for item in cell)
        assert seen == Counter(range(n)), (n, world, steps, micro)
        assert len(cells) == order.steps_per_epoch


def test_every_rank_runs_the_fewest_micro_steps_that_hold_the_window():
    for n, world, steps, micro in SHAPES:
        order = GlobalOrder(num_items=n, global_batch_size=world * steps * micro)
        for window, ranks in zip(order.windows(0), cells_of_epoch(order, 0, world, micro), strict=True):
            expected = -(-len(window) // (world * micro))
            assert [len(rank) for rank in ranks] == [expected] * world
            assert max(len(cell) for rank in ranks for cell in rank) <= micro


def test_cells_hold_the_window_in_order_and_differ_by_at_most_one_item():
    for n, world, _, micro in SHAPES:
        ranks = [rank_cells(range(n), world_size=world, rank=rank, micro_batch_size=micro) for rank in range(world)]
        in_order = [cell for step in zip(*ranks, strict=True) for cell in step]
        assert [item for cell in in_order for item in cell] == list(range(n))
        sizes = [len(cell) for cell in in_order]
        assert max(sizes) - min(sizes) <= 1


def test_a_cell_is_empty_only_with_fewer_items_than_ranks_or_micro_batches_of_one():
    for n, world, micro in itertools.product(range(1, 60), WORLDS, (1, 2, 3, 4)):
        if 0 in cut(n, world_size=world, micro_batch_size=micro).sizes:
            assert n < world or micro == 1, (n, world, micro)


def test_full_windows_have_full_cells():
    plan = cut(24, world_size=2, micro_batch_size=4)
    assert (plan.micro_steps, plan.sizes) == (3, (4,) * 6)
    assert list(rank_cells(range(24), world_size=2, rank=1, micro_batch_size=4)[1]) == [12, 13, 14, 15]


def test_ragged_windows_are_spread_evenly():
    plan = cut(9, world_size=2, micro_batch_size=4)
    assert (plan.micro_steps, plan.sizes) == (2, (3, 2, 2, 2))


def test_windows_hold_the_same_items_whatever_the_world_and_micro_batch_size():
    order = GlobalOrder(num_items=50, global_batch_size=12, seed=4)
    for world, micro in [(1, 12), (1, 3), (2, 3), (3, 2), (4, 3)]:
        for window, ranks in zip(order.windows(1), cells_of_epoch(order, 1, world, micro), strict=True):
            assert {item for rank in ranks for cell in rank for item in cell} == set(window)


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[int]:
        windows = GlobalOrder(num_items=100, global_batch_size=8, seed=seed).windows(epoch)
        return [item for window in windows for item in window]

    assert order(0, 1) == order(0, 1)
    assert order(0, 0) != order(0, 1)
    assert order(0, 1) != order(1, 0)
    assert order(0, 0) != list(range(100))


def test_without_shuffle_every_epoch_has_the_order_of_the_data_set():
    order = GlobalOrder(num_items=5, global_batch_size=2, shuffle=False)
    assert [list(window) for window in order.windows(7)] == [[0, 1], [2, 3], [4]]


def test_drop_last_leaves_out_the_ragged_window():
    order = GlobalOrder(num_items=11, global_batch_size=4, drop_last=True)
    assert [len(window) for window in order.windows(0)] == [4, 4]
    assert order.steps_per_epoch == 2
    assert GlobalOrder(num_items=11, global_batch_size=4).steps_per_epoch == 3
    assert GlobalOrder(num_items=8, global_batch_size=4).steps_per_epoch == 2


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_goes_on_from_any_position(shuffle, drop_last):
    order = GlobalOrder(num_items=11, global_batch_size=4, shuffle=shuffle, drop_last=drop_last)
    [whole] = map(list, GlobalOrder(num_items=11, global_batch_size=11, shuffle=shuffle).windows(2))
    for start in range(14):
        windows = [list(window) for window in order.windows(2, start)]
        usable = 11 - (11 - min(start, 11)) % 4 if drop_last else 11
        assert [item for window in windows for item in window] == whole[start:usable], start
        assert all(len(window) == 4 for window in windows[: None if drop_last else -1])
        assert order.steps_from(start) == len(windows)


def test_windows_from_where_one_begins_are_the_rest_of_the_epoch():
    order = GlobalOrder(num_items=11, global_batch_size=4, seed=3)
    assert list(order.windows(1, 4)) == list(order.windows(1))[1:]
    assert [order.steps_from(start) for start in (0, 1, 4, 10, 11, 50)] == [3, 3, 2, 1, 0, 0]


def test_a_position_below_zero_is_refused():
    with pytest.raises(DataError, match="-1 is no position in an epoch; expected 0 or more"):
        list(GlobalOrder(num_items=3, global_batch_size=1).windows(0, -1))


def test_evaluation_sees_every_item_once_in_windows_of_one_micro_step():
    order = GlobalOrder.for_evaluation(11, world_size=2, micro_batch_size=2)
    cells = cells_of_epoch(order, 0, 2, 2)
    assert cells == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]], [[[8, 9]], [[10]]]]


def test_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match="data set is empty"):
        GlobalOrder(num_items=0, global_batch_size=4)


def test_drop_last_that_leaves_nothing_says_what_to_do():
    with pytest.raises(DataError, match=r"drop_last=false, or batch.global_batch_size to 3 or less"):
        GlobalOrder(num_items=3, global_batch_size=4, drop_last=True)


def test_stream_seeds_differ_where_sums_of_their_parts_do_not():
    seeds = {stream_seed("items", seed, epoch, rank) for seed, epoch, rank in itertools.product(range(5), repeat=3)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
