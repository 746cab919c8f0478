"""What a rank does in the tests of checkpoints: a small run that saves, and runs that go on from any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

CLASSES = 7
ITEMS, MICRO = 48, 4
# 12 micro-batches a window on 1, 2, 3 and 4 ranks alike: BatchNorm sees the same ones.
BEFORE, AFTER = 4, 4
# Windows before the save, and after it.
MAX_GRAD_NORM = 1.0


class Net(nn.Module):
    """All sizes odd, so that every shard is uneven on 2, 3 and 4 ranks; `gain` leaves ranks without anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(13, 37), nn.BatchNorm1d(37)
        self.blocks = nn.ModuleList([nn.Linear(37, 29)])
        self.last = nn.Linear(29, CLASSES)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm(self.first(x)))
        return self.last(nn.functional.silu(self.blocks[0](x))) * self.gain


class Loss:
    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        logits = model(batch[0]).float()
        return nn.functional.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])

    def count(self, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        return len(batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self(model, batch)}


def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    biases = [p for name, p in named if "bias" in name]
    others = [p for name, p in named if "bias" not in name]
    return torch.optim.AdamW(
        [{"params": others, "lr": 1e-2, "weight_decay": 0.1}, {"params": biases, "lr": 3e-2, "weight_decay": 0.0}]
    )


def open_run(backend: Any, *, seed: int, precision: str = "fp32") -> tuple[Any, Any]:
    """(engine, scheduler), freshly initialised."""
    import shardkit
    from tests.conformance.ranks import allow_accelerate_fsdp2

    allow_accelerate_fsdp2()
    torch.manual_seed(seed)
    engine = shardkit.open_engine(
        backend,
        Net(),
        make_optimizer,
        max_grad_norm=MAX_GRAD_NORM,
        precision=precision,  # type: ignore[arg-type]
        blocks=["blocks.*"],
        micro_batch_size=MICRO,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.9**step)
    return engine, scheduler


def items(window: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(500 + window)
    x = torch.randn(ITEMS, 13, generator=generator)
    return x, torch.randint(0, CLASSES, (ITEMS,), generator=generator)


def train(engine: Any, scheduler: Any, windows: range) -> list[float]:
    """The losses of these windows."""
    import shardkit

    world, losses = engine.world, []
    engine.model.train()
    for window in windows:
        x, y = items(window)
        cells = [slice(i, i + MICRO) for i in range(0, ITEMS, MICRO)][world.rank :: world.size]
        report = shardkit.train_step(engine, [(x[cell], y[cell]) for cell in cells], Loss())
        scheduler.step()
        losses.append(report.loss)
    return losses


def evaluation(engine: Any) -> float:
    """The loss on a batch that all ranks hold, in evaluation mode."""
    engine.model.eval()
    with engine.inference():
        value, _ = Loss()(engine.model, items(99))
    engine.model.train()
    return float(value)


def state(engine: Any) -> list[tuple[tuple[str, str, str | None], tuple[int, ...], int, torch.Tensor]]:
    return [((i.kind, i.name, i.state), i.shape, i.start, i.tensor.detach().clone()) for i in engine.state()]


def numbers(engine: Any) -> dict[str, dict[str, float]]:
    return {name: {key: float(v) for key, v in values.items()} for name, values in engine.scalars().items()}


def save_source(backend: Any, folder: str, precision: str = "fp32") -> dict[str, Any]:
    """Train, save, and train on: what the run was at the save, and the losses after it."""
    import shardkit

    engine, scheduler = open_run(backend, seed=1, precision=precision)
    losses = train(engine, scheduler, range(BEFORE))
    path = shardkit.save_checkpoint(engine, folder, step=BEFORE, training={"scheduler": scheduler.state_dict()})
    result = {
        "path": path,
        "before": losses,
        "evaluation": evaluation(engine),
        "state": state(engine),
        "numbers": numbers(engine),
        "after": train(engine, scheduler, range(BEFORE, BEFORE + AFTER)),
    }
    engine.close()
    return result


def resume_all(backend: Any, sources: list[tuple[str, str]], precision: str = "fp32") -> dict[str, Any]:
    """Go on from each checkpoint of (name, path): what differs from what its source was, and the losses after it.

    `PATH.pt` holds what the source was, put together from its ranks without a checkpoint.
    """
    results = {}
    engine, scheduler = open_run(backend, seed=2, precision=precision)
    fresh = True
    for name, path in sources:
        results[name] = resume_one(engine, scheduler, path)
        results[name]["fresh"] = fresh
        fresh = False
    engine.close()
    return results


def resume_one(engine: Any, scheduler: Any, path: str) -> dict[str, Any]:
    import shardkit

    whole = torch.load(f"{path}.pt", weights_only=True)
    loaded = shardkit.load_checkpoint(engine, path)
    scheduler.load_state_dict(loaded.training["scheduler"])
    worst, missing = 0.0, 0
    for (kind, name, key), _, start, tensor in state(engine):
        saved = whole["state"].get(f"{kind}/{name}/{key}")
        if saved is None:
            missing += 1
            continue
        part = saved[start : start + tensor.numel()]
        worst = max(worst, float((part.double() - tensor.double()).abs().max()) if tensor.numel() else 0.0)
    wrong = {n: v for n, v in numbers(engine).items() if whole["numbers"][n] != v}
    return {
        "state": worst,
        "missing": missing,
        "numbers": len(wrong),
        "evaluation": evaluation(engine),
        "after": train(engine, scheduler, range(BEFORE, BEFORE + AFTER)),
        "step": loaded.step,
    }


def write_whole(path: str, ranks: list[dict[str, Any]]) -> None:
    """Put the tensors of a source together from its ranks, and keep them beside the checkpoint."""
    whole: dict[str, torch.Tensor] = {}
    for rank in reversed(ranks):
        # Reversed: where ranks hold copies, rank 0's is the last word.
        for (kind, name, key), shape, start, tensor in rank["state"]:
            target = whole.setdefault(
                f"{kind}/{name}/{key}", torch.full((max(1, int(torch.Size(shape).numel())),), -7).to(tensor.dtype)
            )
            target[start : start + tensor.numel()] = tensor
    merged = {name: values for rank in ranks for name, values in rank["numbers"].items()}
    torch.save({"state": whole, "numbers": merged}, Path(f"{path}.pt"))


CONTROLS = (
    "nothing",
    "optimizer",
    "step",
    "second moments",
    "weights",
    "scheduler",
    "cursor",
    "weight decay",
    "lr",
)


def resume_without(backend: Any, path: str) -> dict[str, list[float]]:
    """What is lost -> the losses after a resume that lost it; for engines of torch.optim."""
    import shardkit

    results = {}
    engine, scheduler = open_run(backend, seed=2)
    for lost in CONTROLS:
        loaded = shardkit.load_checkpoint(engine, path)
        if lost != "scheduler":
            scheduler.load_state_dict(loaded.training["scheduler"])
        else:
            scheduler.last_epoch = 0
            for group in engine.optimizer.param_groups:
                group["lr"] = group["initial_lr"]
        if lost == "optimizer":
            with engine.load_state({}):
                pass
        for values in engine.optimizer.state.values():
            if lost == "step":
                values["step"].zero_()
            if lost == "second moments":
                values["exp_avg_sq"].copy_(values["exp_avg_sq"].bfloat16())
        if lost == "weights":
            for interval in engine.state():
                if interval.kind == "parameter":
                    interval.tensor.copy_(interval.tensor.bfloat16())
        if lost in ("weight decay", "lr"):
            key = lost.replace(" ", "_")
            for group in engine.optimizer.param_groups:
                group[key] = engine.optimizer.param_groups[0][key]
        start = 0 if lost == "cursor" else BEFORE
        results[lost] = train(engine, scheduler, range(start, start + AFTER))
    engine.close()
    return results


def dropout_run(backend: Any, folder: str, save: bool) -> dict[str, Any]:
    """Losses with dropout, after a save or after a resume from it."""
    import shardkit
    from shardkit.seeds import seed_apart
    from tests.conformance.ranks import allow_accelerate_fsdp2

    allow_accelerate_fsdp2()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(13, 37), nn.Dropout(0.5), nn.Linear(37, CLASSES))
    engine = shardkit.open_engine(backend, model, make_optimizer, micro_batch_size=MICRO)
    scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, 1.0)
    notes: tuple[str, ...] = ()
    seed_apart(11, engine.world.rank)
    if save:
        train(engine, scheduler, range(2))
        shardkit.save_checkpoint(engine, folder, step=2)
    else:
        notes = shardkit.load_checkpoint(engine, folder).notes
    losses = train(engine, scheduler, range(2, 4))
    engine.close()
    return {"losses": losses, "notes": notes}
