"""Text that every Python brings along, so that a language recipe needs no download.

It is what `help("topics")` shows, about 460 kB of English and code. It differs between versions of Python, so
losses are comparable under the same one only.
"""

from __future__ import annotations

from typing import Literal

import torch

from shardkit.errors import RequestError


class Topics:
    """Items `(tokens, next tokens)`: two int64 `(context,)`, the bytes of a piece and the same one byte on.

    Pieces follow each other without overlap. The last tenth of the text is for evaluation.
    """

    def __init__(self, split: Literal["train", "eval"], context: int = 64) -> None:
        """Read the text into memory, one byte a token.

        Args:
            split: which part.
            context: tokens an item.

        Raises:
            RequestError: there is no such split, or the text is shorter than one item.
        """
        if split not in ("train", "eval"):
            raise RequestError(f"Topics has no split {split!r}; expected train or eval")
        text = _text()
        start = len(text) - len(text) // 10
        self.tokens = text[:start] if split == "train" else text[start:]
        self.context = context
        if not 1 <= context < len(self.tokens):
            raise RequestError(f"context {context} is not possible; expected 1 to {len(self.tokens) - 1} bytes")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        start = index * self.context
        piece = self.tokens[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


def _text() -> torch.Tensor:
    """All topics, sorted by name, as uint8."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
