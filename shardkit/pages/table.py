"""A table of text, as pages, Markdown and terminals show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under a head; the first column names the row."""

    caption: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
