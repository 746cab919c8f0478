"""One process of plain torch without any shardkit: what every backend has to reproduce."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.conformance.cases import Case, TokenLoss, all_items, build_model, build_optimizer


def reference(case: Case) -> dict[str, Any]:
    """Train `case` on whole logical batches: loss = sum / valid tokens, global clipping, one step a window."""
    model, loss_fn = build_model(case), TokenLoss(case.scale)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = build_optimizer(case, trainable)
    losses, norms = [], []
    for _, tokens, targets in all_items(case):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.precision == "bf16-mixed"):
            total, count = loss_fn(model, (tokens, targets))
        loss = total / count
        loss.backward()
        gradients = [p.grad for _, p in trainable if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        losses.append(loss.item())
        norms.append(norm)
        if not math.isfinite(norm):
            continue
        if case.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in trainable], case.max_grad_norm)
        optimizer.step()
    return {
        "losses": losses,
        "grad_norms": norms,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "moments": {
            (name, key): value.clone()
            for name, p in trainable
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        },
    }
