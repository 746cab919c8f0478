"""Under bf16-true a model takes inputs of any floating dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardkit.engines.opening import open_engine
from shardkit.window import train_step


class Named(nn.Module):
    """Takes a mapping, and remembers what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen = [batch["x"].dtype, batch["index"].dtype]
        return self.linear(batch["x"])


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    assert batch["x"].dtype == torch.float32, "what goes past the model stays as it is"
    return model(batch).float().square().sum(), len(batch["x"])


def opened(precision: Any) -> Any:
    torch.manual_seed(0)
    make = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
    return open_engine("single", Named(), make, precision=precision)


def test_floating_inputs_are_cast_and_others_are_not() -> None:
    engine = opened("bf16-true")
    batch = {"x": torch.randn(3, 4), "index": torch.arange(3)}
    report = train_step(engine, [batch], squares)
    assert engine.model.seen == [torch.bfloat16, torch.int64]
    assert engine.model.linear.weight.dtype == torch.bfloat16 and report.grad_norm > 0


def test_other_precisions_cast_nothing() -> None:
    engine = opened("fp32")
    train_step(engine, [{"x": torch.randn(3, 4), "index": torch.arange(3)}], squares)
    assert engine.model.seen == [torch.float32, torch.int64]
