"""The first items of another data set."""

from __future__ import annotations

from typing import Any

from shardkit.errors import DataError


class First:
    """Items 0 to count - 1 of a map-style data set.

    Raises:
        DataError: there are fewer.
    """

    def __init__(self, dataset: Any, count: int) -> None:
        if len(dataset) < count:
            raise DataError(f"{type(dataset).__name__} has {len(dataset)} items, and the first {count} were asked for")
        self.dataset, self.count = dataset, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.dataset[index]
