"""The order of samples: a function of (seed, epoch) alone, which ranks and micro-batches only cut.

Because the cutting never reorders, a window holds the same items at every world size and micro-batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardkit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the items of one window lie in its cells, the micro-batches of all ranks.

    Cell `micro_step * world_size + rank` holds the next `sizes[cell]` items of the window.
    """

    micro_steps: int
    sizes: tuple[int, ...]


def cut(num_items: int, *, world_size: int, micro_batch_size: int) -> Cut:
    """The cells of a window of `num_items`: as few micro-steps as hold them, the same number on every rank.

    Sizes differ by at most one, so a full window has only full cells. A cell is empty only where there are
    fewer items than cells: fewer items than ranks, or micro-batches of one item.
    """
    micro_steps = -(-num_items // (world_size * micro_batch_size))
    size, larger = divmod(num_items, micro_steps * world_size)
    sizes = (size + 1,) * larger + (size,) * (micro_steps * world_size - larger)
    return Cut(micro_steps=micro_steps, sizes=sizes)


def rank_cells(window: Sequence[int], *, world_size: int, rank: int, micro_batch_size: int) -> list[Sequence[int]]:
    """The items of `window` that `rank` sees, one sequence a micro-step; empty where it has none."""
    plan = cut(len(window), world_size=world_size, micro_batch_size=micro_batch_size)
    starts = [0]
    for size in plan.sizes:
        starts.append(starts[-1] + size)
    cells = range(rank, len(plan.sizes), world_size)
    return [window[starts[cell] : starts[cell + 1]] for cell in cells]


@dataclass(frozen=True, kw_only=True)
class GlobalOrder:
    """Which samples each optimizer step sees, over all ranks together.

    Raises:
        DataError: there are no items, or `drop_last` would drop all of them.
    """

    num_items: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    # A new order each epoch; False = the data set's own order, always.
    drop_last: bool = False
    # Leave out the items at the end of an epoch that do not fill a window.

    def __post_init__(self) -> None:
        if self.num_items < 1:
            raise DataError("the data set is empty; expected 1 item or more: check the path or filter it is built from")
        if self.drop_last and self.num_items < self.global_batch_size:
            raise DataError(
                f"data.drop_last leaves nothing to train on: the data set has {self.num_items} items, fewer "
                f"than a global batch of {self.global_batch_size}; set data.drop_last=false, or "
                f"batch.global_batch_size to {self.num_items} or less"
            )

    @classmethod
    def for_evaluation(cls, num_items: int, *, world_size: int, micro_batch_size: int) -> GlobalOrder:
        """Every item once, in the data set's own order, one micro-step a window.

        Raises:
            DataError: there are no items.
        """
        return cls(num_items=num_items, global_batch_size=world_size * micro_batch_size, shuffle=False)

    @property
    def steps_per_epoch(self) -> int:
        return self.steps_from(0)

    def steps_from(self, start: int) -> int:
        """Windows of an epoch from its sample position `start` on; 0 where nothing is left.

        Raises:
            DataError: `start` is below 0.
        """
        if start < 0:
            raise DataError(f"{start} is no position in an epoch; expected 0 or more")
        full, rest = divmod(max(0, self.num_items - start), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def windows(self, epoch: int, start: int = 0) -> Iterator[Sequence[int]]:
        """The sample numbers of each window of `epoch`, from its sample position `start` on.

        `start` need not be where a window of the whole epoch begins, as after a change of the global batch size: the
        windows go on from there. The last one is short, or left out with `drop_last`.

        Raises:
            DataError: `start` is below 0.
        """
        steps = self.steps_from(start)
        order = self._permutation(epoch) if self.shuffle else None
        for first in range(start, start + steps * self.global_batch_size, self.global_batch_size):
            stop = min(first + self.global_batch_size, self.num_items)
            yield range(first, stop) if order is None else order[first:stop].tolist()

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(stream_seed("order", self.seed, epoch))
        return torch.randperm(self.num_items, generator=generator)


def stream_seed(*parts: int | str) -> int:
    """A 63-bit seed; hashed, so that lists of parts do not share a stream, as 0 + 1 and 1 + 0 would."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
