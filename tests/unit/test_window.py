from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardkit.errors import WindowError
from shardkit.window import Counted, Window, join_batches, train_step

Pair = namedtuple("Pair", ["x", "y"])


class Items:
    def __call__(self, model: Any, batch: Any) -> Any:
        raise AssertionError("not called")

    def count(self, batch: Any) -> int:
        return len(batch[0])

    def metrics(self, model: Any, batch: Any) -> Any:
        raise AssertionError("not called")


def pair(n: int, start: int = 0) -> list[torch.Tensor]:
    return [torch.arange(start, start + n).reshape(n, 1), torch.arange(start, start + n)]


@pytest.mark.parametrize("kind", [list, tuple, lambda parts: Pair(*parts)])
def test_batches_are_joined_inside_their_structure(kind: Any) -> None:
    joined = join_batches([kind(pair(2)), kind(pair(3, 2))])
    assert type(joined) is type(kind(pair(1)))
    assert joined[0].flatten().tolist() == joined[1].tolist() == [0, 1, 2, 3, 4]


def test_mappings_nest_and_entries_an_item_are_put_in_a_row() -> None:
    batches = [{"a": {"x": torch.ones(n, 2)}, "names": ["s"] * n, "kind": "train"} for n in (1, 2)]
    joined = join_batches(batches)
    assert joined["a"]["x"].shape == (3, 2) and joined["names"] == ["s"] * 3 and joined["kind"] == "train"


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "different shapes ((3,), (4,))"),
        ([torch.ones(2), [torch.ones(2)]], "differ in type"),
        ([3, 4], "cannot concatenate int"),
    ],
)
def test_what_cannot_be_joined_is_refused(batches: list[Any], said: str) -> None:
    with pytest.raises(WindowError) as caught:
        join_batches(batches)
    assert said in str(caught.value)


def test_a_joined_window_counts_as_its_micro_batches_do() -> None:
    assert len(Window([pair(2), pair(3)]).joined(Items())) == 1
    # Images as one entry an item: joining them along their first dim would be wrong, and the count shows it.
    images = ((torch.ones(3, 4, 4), torch.ones(3, 4, 4)), torch.ones(2))
    with pytest.raises(WindowError, match="first dim"):
        Window([images, images]).joined(Items())


def test_a_window_needs_a_micro_batch() -> None:
    with pytest.raises(WindowError, match="no micro-batch"):
        train_step(None, [], Items())  # type: ignore[arg-type]


@dataclass
class Peers:
    """A world whose other ranks add what they are told to; counts the collectives."""

    others: list[list[float]]
    rank: int = 0
    device: str = "cpu"
    sums: list[torch.Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sums.append(tensor)
        return tensor + torch.tensor(self.others, dtype=tensor.dtype).sum(0)


@pytest.mark.parametrize(
    ("ask", "peer", "asked"), [(False, 0, False), (True, 0, True), (False, 1, True), (True, 1, True)]
)
def test_what_any_rank_asks_is_known_to_all_without_a_collective_of_its_own(ask: bool, peer: int, asked: bool) -> None:
    world: Any = Peers([[3.0, 2.0, 4.0, peer]])
    assert Window([pair(2), pair(3)]).count_items(Items(), world, ask=ask) == Counted(items=8.0, asked=asked)
    assert len(world.sums) == 1


def test_a_skipped_window_is_still_heard() -> None:
    engine: Any = type("Skipping", (), {"world": Peers([[0.0, 1.0, 1.0, 1.0]])})
    report = train_step(engine, [pair(0)], Items())
    assert report.skipped and report.asked


def test_windows_of_different_length_are_refused_whoever_asks() -> None:
    world: Any = Peers([[3.0, 1.0, 1.0, 1.0]])
    with pytest.raises(WindowError, match="rank 0 has 2 micro-batches"):
        Window([pair(2), pair(3)]).count_items(Items(), world)
