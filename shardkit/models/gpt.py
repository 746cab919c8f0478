"""A small decoder-only transformer: pre-norm, causal, with a tied embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.errors import RequestError


class GPT(nn.Module):
    """Tokens `(N, T)`, int64 and T <= context, to logits `(N, T, vocab_size)` of the token after each."""

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 64,
        width: int = 128,
        heads: int = 4,
        layers: int = 4,
        tie: bool = True,
        dropout: float = 0.0,
    ) -> None:
        """Build it with random weights of standard deviation 0.02.

        Args:
            vocab_size: different tokens; 256 for bytes.
            context: the longest sequence, in tokens.
            width: features of a token; a multiple of `heads`.
            heads: attention heads of a block.
            layers: blocks.
            tie: let the head's weight be the embedding's.
            dropout: the part of attention weights and of each block's updates that is dropped in training.

        Raises:
            RequestError: the heads do not divide the width.
        """
        super().__init__()
        if width % heads:
            raise RequestError(f"model.width: {width} is not a multiple of {heads} heads")
        self.embedding = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_initialise)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            features = block(features)
        return self.head(self.norm(features))


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = features + self.dropout(self.attention(self.attention_norm(features)))
        return features + self.dropout(self.mlp(self.mlp_norm(features)))


class Attention(nn.Module):
    """Each token looks at itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        batch, length, width = features.shape
        qkv = self.qkv(features).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
