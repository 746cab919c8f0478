"""Windows of micro-batches for one rank."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

from shardkit.data.loader import MicroBatch, Windows, move, num_items
from shardkit.data.order import GlobalOrder
from shardkit.errors import DataError


class Squares:
    """Items (n, n * n)."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        return torch.tensor([float(index)]), index * index


class Draws(Squares):
    """Items are draws of the three global streams."""

    def __getitem__(self, index: int):
        return torch.rand(()).item(), random.random(), np.random.random()


class Broken(Squares):
    def __getitem__(self, index: int):
        raise ValueError(f"item {index} is rotten")


class Stuck(Squares):
    def __getitem__(self, index: int):
        if index:
            time.sleep(600)
        return index


class Killed(Squares):
    """Its loader process gets every signal a process group may get."""

    def __getitem__(self, index: int):
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), name)
        return super().__getitem__(index)


def windows(dataset, world: int = 1, rank: int = 0, *, batch: int = 4, micro: int = 2, shuffle=True, **options):
    order = GlobalOrder(num_items=len(dataset), global_batch_size=batch, shuffle=shuffle)
    return Windows(dataset, order=order, world_size=world, rank=rank, micro_batch_size=micro, **options)


def draws(epoch: int = 0, start: int = 0, dataset=None, **options) -> dict[int, tuple[float, ...]]:
    """What each item of an epoch drew."""
    found = {}
    for window in windows(dataset or Draws(8), **options).epoch(epoch, start):
        for micro in window:
            items = [tuple(map(float, item)) for item in zip(*micro.batch, strict=True)]
            found |= dict(zip(micro.indices, items, strict=False))  # a filler has no number
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_the_samples_their_indices_say(num_workers):
    seen = []
    for window in windows(Squares(), num_workers=num_workers).epoch(2):
        for micro in window:
            assert micro.batch[0].flatten().tolist() == list(micro.indices)
            assert micro.batch[1].tolist() == [index * index for index in micro.indices]
            seen += micro.indices
    assert sorted(seen) == list(range(11))


def test_ranks_and_workers_only_cut_the_order():
    whole = [micro.indices for [micro] in windows(Squares(), micro=4).epoch(1)]
    for options in ({"num_workers": 0}, {"num_workers": 2}):
        ranks = [list(windows(Squares(), 2, rank, micro=1, **options).epoch(1)) for rank in (0, 1)]
        for want, of_ranks in zip(whole, zip(*ranks, strict=True), strict=True):
            steps = zip(*of_ranks, strict=True)
            assert tuple(index for step in steps for micro in step for index in micro.indices) == want


def test_a_rank_without_items_gets_the_first_item_of_the_window_as_filler():
    [[first]] = windows(Squares(2), 3, 0, batch=6, shuffle=False).epoch(0)
    [[filler]] = windows(Squares(2), 3, 2, batch=6, shuffle=False).epoch(0)
    assert (first.filler, first.indices) == (False, (0,))
    assert (filler.filler, filler.indices) == (True, ())
    assert filler.batch[0].tolist() == [[0.0]]


def test_a_single_item_gives_every_rank_one_micro_step():
    for rank in range(4):
        [[micro]] = windows(Squares(1), 4, rank, batch=8).epoch(0)
        assert micro.filler == (rank != 0)


def test_an_iterator_keeps_its_epoch_when_another_is_made():
    source = windows(Squares(), num_workers=1)
    first, second = source.epoch(0), source.epoch(1)
    interleaved = [(a[0].indices, b[0].indices) for a, b in zip(first, second, strict=True)]
    assert [a for a, _ in interleaved] == [window[0].indices for window in source.epoch(0)]
    assert [b for _, b in interleaved] == [window[0].indices for window in source.epoch(1)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_an_item_draws_is_a_function_of_seed_epoch_and_item(num_workers):
    whole = draws()
    assert sorted(whole) == list(range(8))
    for world, micro in [(1, 1), (2, 1), (2, 2), (3, 1)]:
        ranks = [
            draws(world=world, rank=rank, micro=micro, batch=world * micro, num_workers=num_workers)
            for rank in range(world)
        ]
        merged = {index: item for rank in ranks for index, item in rank.items()}
        assert merged == whole, (world, micro)


def test_no_two_items_epochs_or_seeds_share_a_random_stream():
    found = [draws(epoch, seed=seed) for epoch in (0, 1) for seed in (0, 1)]
    values = [number for items in found for item in items.values() for number in item]
    assert len(set(values)) == len(values) == 4 * 8 * 3


def test_torch_and_numpy_do_not_draw_the_same_bits():
    class Bits(Squares):
        def __getitem__(self, index: int):
            drawn = torch.empty(8, dtype=torch.int64).random_(0, 2**32).tolist()
            return drawn, np.random.randint(0, 2**32, 8, dtype=np.uint32).tolist()

    for [micro] in windows(Bits(4), micro=1, batch=1, collate=lambda items: items[0]).epoch(0):
        assert not set(micro.batch[0]) & set(micro.batch[1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_goes_on_has_the_same_items_as_one_that_was_not_cut(num_workers):
    def seen(start: int) -> list[tuple]:
        found = windows(Draws(11), num_workers=num_workers).epoch(1, start)
        return [(micro.indices, [part.tolist() for part in micro.batch]) for window in found for micro in window]

    assert seen(4) == seen(0)[2:]
    assert [indices for indices, _ in seen(11)] == []


def test_nothing_is_made_for_the_samples_before_the_start():
    asked: list[int] = []

    class Told(Squares):
        def __getitem__(self, index: int):
            asked.append(index)
            return super().__getitem__(index)

    list(windows(Told(), shuffle=False).epoch(0, 9))
    assert asked == [9, 10]


class Several(Draws):
    """Made a cell at a time."""

    cells: list[list[int]] = []

    def __getitems__(self, indices: list[int]):
        self.cells.append(indices)
        return [self[index] for index in indices]


def test_a_data_set_that_makes_several_items_is_asked_a_cell_at_a_time_and_seeded_by_its_first():
    Several.cells.clear()
    found, alone = draws(dataset=Several(8), shuffle=False), draws(shuffle=False)
    assert Several.cells == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [index for index in range(8) if found[index] == alone[index]] == [0, 2, 4, 6]


def test_a_subset_makes_its_items_one_by_one_unless_what_it_is_a_part_of_makes_several():
    Several.cells.clear()
    part = range(4, 12)
    alone = draws(dataset=Subset(Draws(12), part), shuffle=False)
    assert alone == draws(shuffle=False)
    draws(dataset=Subset(Subset(Several(12), range(12)), part), shuffle=False)
    assert Several.cells == [[4, 5], [6, 7], [8, 9], [10, 11]]


class Method(Squares):
    """`__getitems__` there, but not to be used: what DataLoader takes for absent."""

    __getitems__ = None


def test_a_method_set_to_none_is_not_called():
    assert [micro.indices for [micro] in windows(Method(2), batch=2).epoch(0)]


def test_a_collate_function_goes_on_with_the_stream_of_the_last_item():
    def collate(items: list) -> float:
        return torch.rand(()).item()

    [[micro]] = windows(Draws(1), batch=1, collate=collate).epoch(0)
    [[alone]] = windows(Draws(1), batch=1, collate=lambda items: items[0][0]).epoch(0)
    assert micro.batch != alone.batch
    assert [again.batch for [again] in windows(Draws(1), batch=1, collate=collate).epoch(0)] == [micro.batch]


class Own(Squares):
    def __getitem__(self, index: int):
        return type(get_worker_info().dataset).__name__


def test_worker_info_names_the_users_data_set():
    [[micro]] = windows(Own(1), batch=1, num_workers=1).epoch(0)
    assert micro.batch == ["Own"]


def test_making_items_does_not_move_the_streams_of_the_process():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    want = torch.rand(1).item(), random.random(), np.random.random()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    iterator = windows(Draws(8)).epoch(0)
    next(iterator)
    assert (torch.rand(1).item(), random.random(), np.random.random()) == want
    next(iterator)
    next(windows(Draws(8), num_workers=1).epoch(0))
    torch.manual_seed(5)
    assert torch.rand(1).item() == want[0]


def test_drawing_between_windows_does_not_move_the_streams_of_the_items():
    other = []
    for window in windows(Draws(8)).epoch(0):
        other += [tuple(map(float, item)) for micro in window for item in zip(*micro.batch, strict=True)]
        torch.rand(3), random.random(), np.random.random()
    assert other == list(draws().values())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_data_set_keeps_its_type_and_traceback(num_workers):
    with pytest.raises(ValueError, match="is rotten") as caught:
        next(windows(Broken(), num_workers=num_workers).epoch(0))
    assert "__getitem__" in str(caught.value) or any(entry.name == "__getitem__" for entry in caught.traceback)


def test_loader_processes_outlive_signals_to_the_process_group():
    seen = [index for window in windows(Killed(), num_workers=2).epoch(0) for m in window for index in m.indices]
    assert sorted(seen) == list(range(11))


def _fail_with_loaders() -> None:
    """A training process that an error ends while its loaders wait for work, or hang in an item."""
    for dataset in (Squares(), Stuck()):
        _kept.append(windows(dataset, micro=1, batch=1, shuffle=False, num_workers=1).epoch(0))
        next(_kept[-1])
    raise SystemError("the step failed")


_kept: list = []  # As a traceback keeps the frames of the training loop.


def test_an_error_ends_a_process_whose_loaders_ignore_signals(capfd):
    process = multiprocessing.get_context("fork").Process(target=_fail_with_loaders)
    process.start()
    process.join(timeout=20)
    process.kill()
    assert process.exitcode == 1
    assert capfd.readouterr().err.rstrip().endswith("SystemError: the step failed")


def test_a_collate_function_makes_the_batch():
    [[micro], *_] = windows(Squares(), micro=4, collate=lambda items: {"n": len(items)}).epoch(0)
    assert micro.batch == {"n": 4}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), iter([1, 2]), {1, 2}])
def test_what_is_not_map_style_is_refused_with_what_to_do(dataset):
    with pytest.raises(DataError, match=r"__len__ and __getitem__.*in a list"):
        num_items(dataset)
    with pytest.raises(DataError, match="not a map-style data set"):
        Windows(dataset, order=GlobalOrder(num_items=3, global_batch_size=1), micro_batch_size=1)


def test_an_order_for_another_size_is_refused():
    with pytest.raises(DataError, match="has 11 items, but the order was made for 3"):
        Windows(Squares(), order=GlobalOrder(num_items=3, global_batch_size=1), micro_batch_size=1)


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: list[torch.Tensor]


Point = namedtuple("Point", "x y")


def test_move_reaches_tensors_in_nested_containers_and_dataclasses():
    tensor, meta = torch.zeros(2), torch.device("meta")
    value = {"pair": Pair(tensor, [tensor]), "point": Point(tensor, "text"), "tuple": (tensor, 3)}
    moved = move(value, meta)
    assert moved["pair"].left.device == moved["pair"].right[0].device == meta
    assert moved["point"].x.device == moved["tuple"][0].device == meta
    assert (moved["point"].y, moved["tuple"][1]) == ("text", 3)
    assert isinstance(moved["pair"], Pair) and isinstance(moved["point"], Point)
    assert value["pair"].left is tensor


def test_micro_batches_are_frozen():
    with pytest.raises(AttributeError):
        MicroBatch(batch=None, indices=()).filler = True  # type: ignore[misc]
