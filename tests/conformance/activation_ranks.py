"""What a rank does in the tests of activation checkpointing: runs with and without it, and how far apart they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.communication import counted
from tests.conformance.cases import Case, TokenLoss, batch_of, build_model, build_optimizer
from tests.conformance.ranks import allow_accelerate_fsdp2

# Accumulation, a ragged last window, and clipping.
SHAPE: dict[str, Any] = {"windows": (16, 13, 5), "micro_batch_size": 4, "optimizer": "momentum", "max_grad_norm": 0.05}
PLAIN = Case("plain", **SHAPE)
BATCH_NORM = Case("batchnorm", model="batchnorm", **SHAPE)
BF16: dict[str, Any] = {**SHAPE, "precision": "bf16-mixed"}
# Name -> case, normalization policy, dropout.
VARIANTS: dict[str, tuple[Case, str, float]] = {
    "plain": (PLAIN, "keep", 0.0),
    "dropout": (PLAIN, "keep", 0.3),
    "tied": (Case("tied", model="tied", **SHAPE), "keep", 0.0),
    "frozen": (Case("frozen", model="frozen", **SHAPE), "keep", 0.0),
    "bf16": (Case("bf16", **BF16), "keep", 0.3),
    "bf16-batchnorm": (Case("bf16-batchnorm", model="batchnorm", **BF16), "keep", 0.0),
    **{policy: (BATCH_NORM, policy, 0.0) for policy in ("keep", "sync", "deferred", "exact", "frozen-norms")},
}


def compare(backend: Any, variants: list[str]) -> dict[str, dict[str, Any]]:
    """Variant -> what this rank saw of each."""
    return {name: _compared(backend, *VARIANTS[name]) for name in variants}


def _compared(backend: Any, case: Case, policy: str, dropout: float) -> dict[str, Any]:
    # Every second block is looked at in two of them: with and without norms that exact recomputes.
    values = ["none", "blocks", *([2] if case is PLAIN or policy == "exact" else [])]
    without, *others = (_run(backend, case, policy, dropout, value) for value in values)
    return {
        "apart": [_apart(each["numbers"], without["numbers"]) for each in others],
        "state apart": [_state_apart(each["state"], without["state"]) for each in others],
        "calls": [each["calls"] for each in (without, *others)],
        "communication": [each["communication"] for each in (without, *others)],
        "counted": others[0]["counted"],
        "micro-steps": without["micro-steps"],
    }


def _run(backend: Any, case: Case, policy: str, dropout: float, value: Any) -> dict[str, Any]:
    allow_accelerate_fsdp2()
    model = build_model(case)
    calls: Counter[str] = Counter()
    for index, block in enumerate(model.blocks):
        block.norm = nn.Sequential(nn.Dropout(dropout), block.norm)
        block.norm.register_forward_pre_hook(lambda module, _, index=index: calls.update([f"blocks.{index}"]))
    engine = shardkit.open_engine(
        backend,
        model,
        lambda named: build_optimizer(case, named),
        max_grad_norm=case.max_grad_norm,
        precision=case.precision,  # type: ignore[arg-type]
        blocks=["blocks.*"],
        activation_checkpointing=value,
        normalization=policy.removesuffix("-norms"),  # type: ignore[arg-type]
        micro_batch_size=case.micro_batch_size,
    )
    world, numbers, micro_steps = engine.world, [], 0
    torch.manual_seed(world.rank)
    with counted() as counts:
        for window in range(len(case.windows)):
            # Of the last window: libraries make their plans in the first ones.
            counts.take()
            cells = [step[world.rank] for step in case.cells(window, world.size)]
            batches = [
                shardkit.MicroBatch(
                    batch=batch_of(case, window, cell or [0], world.device), filler=not cell, indices=tuple(cell)
                )
                for cell in cells
            ]
            report = shardkit.train_step(engine, batches, TokenLoss())
            numbers += [report.loss, report.grad_norm]
            micro_steps += len(batches)
        communication = {kind: (volume.calls, volume.bytes) for kind, volume in counts.take().items()}
    state = {(i.kind, i.name, i.state): i.tensor.detach().clone() for i in engine.state()}
    engine.close()
    tracked = {int(t) for (_, name, _), t in state.items() if name.endswith("num_batches_tracked")}
    return {
        "numbers": numbers,
        "state": state,
        "calls": [calls["blocks.0"], calls["blocks.1"]],
        "communication": communication,
        "counted": sorted(tracked),
        "micro-steps": micro_steps,
    }


def _apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def _state_apart(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[key].double() - b[key].double()).abs().max()) for key in a if a[key].numel())


def fickle(backend: Any) -> None:
    """A block that takes another way when it is recomputed."""
    allow_accelerate_fsdp2()

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x[self.calls :]).tanh().sum(0, keepdim=True) + x

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Fickle(), nn.Linear(4, 4)), nn.Linear(4, 2))
    engine = shardkit.open_engine(
        backend,
        model,
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        activation_checkpointing="blocks",
    )
    shardkit.train_step(engine, [torch.randn(5, 4)], lambda net, x: (net(x).sum(), len(x)))


def without_blocks(backend: Any) -> None:
    allow_accelerate_fsdp2()
    shardkit.open_engine(
        backend,
        nn.Linear(2, 2),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        activation_checkpointing="blocks",
    )
