"""The cases: a model, a few windows of items, and how to step; the same numbers for every backend and world."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

IGNORED = -100
CLASSES = 3


class Block(nn.Module):
    """An odd-sized residual block with a norm, so that shards are uneven on 2, 3 and 4 ranks."""

    def __init__(self, width: int, norm: str = "layer") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm == "layer" else nn.BatchNorm1d(width)
        self.up = nn.Linear(width, width + 2)
        self.down = nn.Linear(width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # SiLU: a ReLU's kink turns rounding into differences of 1e-4 in fp32.
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@dataclass
class Output:
    """What some libraries return."""

    logits: torch.Tensor
    hidden: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    name: str
    logits: torch.Tensor


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda logits: logits,
    "dict": lambda logits: {"logits": logits},
    "tuple": lambda logits: (logits, None),
    "list": lambda logits: [logits],
    "namedtuple": lambda logits: Pair("net", logits),
    "dataclass": lambda logits: Output(logits),
}


def logits_of(output: Any) -> torch.Tensor:
    """The logits in whatever a `Net` returned."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict):
        return output["logits"]
    return output.logits if hasattr(output, "logits") else output[0]


class Net(nn.Module):
    """Tokens (N, T) -> logits (N, T, classes); options plant what backends trip over."""

    def __init__(
        self,
        *,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        norm: str = "layer",
        output: str = "tensor",
    ) -> None:
        super().__init__()
        width = 7
        self.embedding = nn.Embedding(CLASSES if tied else 11, width)
        self.blocks = nn.ModuleList([Block(width, norm) for _ in range(2)])
        # One row only: on two ranks or more, some hold nothing of it.
        self.gain = nn.Parameter(torch.ones(1, width))
        self.head = nn.Linear(width, CLASSES, bias=False)
        self.vocabulary, self.output = self.embedding.num_embeddings, output
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].requires_grad_(False)
        if unused:
            self.spare = nn.Linear(width, 5)

    def forward(self, tokens: torch.Tensor) -> object:
        x = self.embedding(tokens % self.vocabulary)
        shape = x.shape
        for block in self.blocks:
            x = block(x.reshape(-1, shape[-1])).reshape(shape)
        logits = self.head(x * self.gain)
        return OUTPUTS[self.output](logits)


def build_model(case: Case) -> Net:
    """The same weights on every rank and in every process."""
    torch.manual_seed(7)
    return Net(
        tied=case.model == "tied",
        frozen=case.model == "frozen",
        unused=case.model == "unused",
        norm="batch" if case.model == "batchnorm" else "layer",
        output=case.output,
    )


@dataclass(frozen=True)
class Case:
    """One training run of a few windows."""

    name: str
    windows: tuple[int, ...] = (8, 8, 8)
    # Items of each logical batch.
    micro_batch_size: int = 4
    # Largest micro-batch of a rank.
    masked: bool = False
    # Different numbers of valid tokens an item; one micro-batch without any.
    model: str = "plain"
    output: str = "tensor"
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    groups: bool = False
    max_grad_norm: float | None = None
    precision: str = "fp32"
    poison: int | None = None
    # The window in which one item's embedding makes the loss NaN.
    nonfinite: str = "error"
    evaluate: bool = False
    # Evaluate between the steps.
    scale: float = 1.0
    # Of the loss: a large gradient shows clipping nobody asked for.
    activation_checkpointing: Any = "none"

    def cells(self, window: int, world_size: int) -> list[list[list[int]]]:
        """[micro-step][rank] -> item numbers; uneven where it does not divide; the window's items are 0..n-1."""
        items = self.windows[window]
        steps = math.ceil(items / (world_size * self.micro_batch_size))
        total = steps * world_size
        bounds = [round(cell * items / total) for cell in range(total + 1)]
        cells = [list(range(bounds[c], bounds[c + 1])) for c in range(total)]
        return [cells[step * world_size : (step + 1) * world_size] for step in range(steps)]


def items(case: Case, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (n, 5) of a window; masked targets are IGNORED."""
    generator = torch.Generator().manual_seed(100 + window)
    n = case.windows[window]
    tokens = torch.randint(0, 11, (n, 5), generator=generator)
    targets = torch.randint(0, CLASSES, (n, 5), generator=generator)
    if case.masked:
        keep = torch.randint(0, 5, (n, 1), generator=generator)
        targets[torch.arange(5)[None, :] >= keep] = IGNORED
        # The first items have no valid token: the first micro-batch of rank 0 counts zero.
        targets[: case.micro_batch_size] = IGNORED
    return tokens, targets


class TokenLoss:
    """Summed cross entropy over valid tokens."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
        logits = logits_of(model(batch[0]))
        loss = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        # A planted NaN: token 99 stands for an item that breaks the loss.
        if (batch[0] == 99).any():
            loss = loss * float("nan")
        return loss * self.scale, self.count(batch)

    def count(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        return float((batch[1] != IGNORED).sum())

    def metrics(self, model: nn.Module, batch: object) -> dict[str, tuple[torch.Tensor, float]]:
        loss, count = self(model, batch)  # type: ignore[arg-type]
        return {"loss": (loss, count)}


def build_optimizer(case: Case, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    plain = [p for name, p in named if not (case.groups and "bias" in name)]
    groups = [{"params": plain}]
    if case.groups:
        groups.append({"params": [p for name, p in named if "bias" in name], "lr": 0.02, "weight_decay": 0.0})
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.1, weight_decay=case.weight_decay)
    if case.optimizer == "momentum":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=case.weight_decay)
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=case.weight_decay)


def batch_of(case: Case, window: int, numbers: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = items(case, window)
    if case.poison == window:
        tokens = tokens.clone()
        tokens[-1, 0] = 99
    return tokens[numbers].to(device), targets[numbers].to(device)


CASES = [
    Case("plain"),
    Case("accumulate", windows=(16, 16, 16), micro_batch_size=2),
    Case("clip", windows=(16, 16, 16), micro_batch_size=4, max_grad_norm=0.05, optimizer="momentum"),
    Case("unclipped", scale=40.0),
    Case("ragged", windows=(16, 13, 5), micro_batch_size=3, optimizer="momentum"),
    Case("masked", windows=(16, 16, 11), micro_batch_size=2, masked=True, optimizer="momentum"),
    Case("filler", windows=(8, 1, 8), micro_batch_size=2),
    Case("tied", model="tied", windows=(8, 8), optimizer="momentum"),
    Case("frozen", model="frozen", windows=(16, 16), micro_batch_size=2, optimizer="adamw", weight_decay=0.1),
    Case("groups", groups=True, optimizer="adamw", weight_decay=0.1),
    Case("decay", optimizer="momentum", weight_decay=0.3, windows=(16, 16, 16), micro_batch_size=2),
    # B43.
    *(Case(kind, output=kind) for kind in OUTPUTS if kind not in ("tensor", "dataclass")),
    Case("evaluate", evaluate=True, optimizer="momentum"),
    Case("skip", poison=1, nonfinite="skip", optimizer="momentum", windows=(8, 8, 8, 8)),
]

BF16 = Case("bf16", precision="bf16-mixed", optimizer="adamw", windows=(16,) * 4, micro_batch_size=4, max_grad_norm=1.0)
BF16_BATCHNORM = replace(BF16, name="bf16-batchnorm", model="batchnorm", windows=(8, 8))


def all_items(case: Case) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    for window in range(len(case.windows)):
        numbers = list(range(case.windows[window]))
        yield window, *batch_of(case, window, numbers, torch.device("cpu"))
