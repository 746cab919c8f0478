"""Batches of a recipe's own first items, of any size."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch.utils.data import default_collate

from shardkit.data.loader import num_items
from shardkit.recipe.build import build
from shardkit.recipe.schema import Recipe


class Sample:
    """The first items of the training data, each read once."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._items: list[Any] = []

    def batch(self, count: int) -> Any:
        """The first `count` items as one batch; again from the first where there are fewer.

        Raises:
            Exception: whatever the data set or the collate function raises.
        """
        number = min(count, num_items(self._dataset))
        self._items += [self._dataset[index] for index in range(len(self._items), number)]
        return self._collate([self._items[index % number] for index in range(count)])

    @cached_property
    def _dataset(self) -> Any:
        return build(self._recipe.data.train)

    @cached_property
    def _collate(self) -> Any:
        return build(self._recipe.data.collate) if self._recipe.data.collate is not None else default_collate
