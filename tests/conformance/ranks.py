"""What a rank of the suite runs: all cases of one backend in one process group, returned as plain numbers."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

HANG_SECONDS = 240


def rank_main(rank: int, size: int, folder: str, function: str, arguments: tuple[Any, ...]) -> None:
    """Join the ranks through a file, run `function`, and leave its result in `folder`.

    `function` is a name of this module, or "package.module:name".
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    # Accelerate insists on them, though the group is joined through a file; nothing listens there.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    log = (Path(folder) / f"log-{rank}").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=log)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    outcome: tuple[str, Any]
    try:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        outcome = ("ok", _named(function)(*arguments))
    except BaseException as error:
        outcome = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(outcome))
    log.flush()
    # A group with a failed or absent member cannot be left in order; nothing else is to be kept.
    os._exit(0)


def _named(function: str) -> Any:
    module, _, name = function.rpartition(":")
    return getattr(importlib.import_module(module), name) if module else globals()[name]


def run_cases(backend: Any, cases: list[Any]) -> dict[str, Any]:
    """Case name -> what this rank saw."""
    return {case.name: run_case(backend, case) for case in cases}


def run_case(backend: Any, case: Any) -> dict[str, Any]:
    import torch

    import shardkit
    from tests.conformance.cases import TokenLoss, batch_of, build_model, build_optimizer

    allow_accelerate_fsdp2()
    world = shardkit.World.current()
    engine = shardkit.open_engine(
        backend,
        build_model(case),
        lambda named: build_optimizer(case, named),
        world=world,
        max_grad_norm=case.max_grad_norm,
        precision=case.precision,
        blocks=["blocks.*"],
        micro_batch_size=case.micro_batch_size,
    )
    loss = TokenLoss(case.scale)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in engine.model.parameters())
    result: dict[str, Any] = {"losses": [], "grad_norms": [], "skipped": [], "held": held}
    for window in range(len(case.windows)):
        cells = [step[world.rank] for step in case.cells(window, world.size)]
        micro_batches = [
            shardkit.MicroBatch(
                batch=batch_of(case, window, cell or [0], world.device), filler=not cell, indices=tuple(cell)
            )
            for cell in cells
        ]
        report = shardkit.train_step(engine, micro_batches, loss, nonfinite=case.nonfinite, step=window + 1)
        result["losses"].append(report.loss)
        result["grad_norms"].append(report.grad_norm)
        result["skipped"].append(report.skipped)
        if case.evaluate:
            engine.model.eval()
            with engine.inference():
                value, _ = loss(engine.model, batch_of(case, window, [0], world.device))
            assert torch.isfinite(value)
            engine.model.train()
    before = [i.tensor.clone() for i in engine.state()]
    result["state"] = [
        (i.kind, i.name, i.state, i.shape, i.start, i.tensor.float().clone(), str(i.tensor.dtype), i.copies)
        for i in engine.state()
    ]
    result["reading changed nothing"] = all(
        torch.equal(a, i.tensor) for a, i in zip(before, engine.state(), strict=True)
    )
    engine.close()
    return result


def allow_accelerate_fsdp2() -> None:
    """The switch of the suite: Accelerate's FSDP2 path on gloo ranks."""
    import importlib.util

    if importlib.util.find_spec("accelerate"):
        from shardkit.engines.accelerate_fsdp2 import AccelerateFsdp2Engine

        AccelerateFsdp2Engine.force_cpu = True


class Scale:
    """loss = w * number for each number of the batch: dL/dw is the sum of the numbers, in plain sight."""

    def __call__(self, model: Any, batch: Any) -> tuple[Any, int]:
        return model(batch).sum(), len(batch)

    def count(self, batch: Any) -> int:
        return len(batch)


def run_numbers(
    backend: Any,
    windows: list[list[list[list[float]]]],
    halving: bool = False,
    precision: str = "fp32",
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """SGD with lr 1 on one weight that starts at 0; `windows[w][rank][micro-step]` are numbers dL/dw.

    Returns the weight after each window, the gradient norms, and the lr each step used.
    """
    import torch

    import shardkit

    os.environ.update(environment or {})
    allow_accelerate_fsdp2()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine = shardkit.open_engine(
        backend, model, lambda named: torch.optim.SGD([p for _, p in named], lr=1.0), precision=precision
    )
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5 if halving else 1.0)
    rank = engine.world.rank
    result: dict[str, Any] = {"weights": [], "grad_norms": [], "lr": [], "losses": [], "skipped": []}
    for window in windows:
        result["lr"].append(engine.optimizer.param_groups[0]["lr"])
        batches = [torch.tensor(numbers).reshape(-1, 1) for numbers in window[rank]]
        report = shardkit.train_step(engine, batches, Scale())
        scheduler.step()
        mine = [i.tensor.clone() for i in engine.state() if i.kind == "parameter"]
        held = [v for values in engine.world.gather([float(t[0]) for t in mine]) for v in values]
        result["weights"].append(held[0])
        result["grad_norms"].append(report.grad_norm)
        result["losses"].append(report.loss)
        result["skipped"].append(report.skipped)
    engine.close()
    return result


def make_encoder() -> Any:
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(11)
            self.layer = torch.nn.Linear(3, 2, bias=False)

        def encode(self, x: Any) -> Any:
            return self.layer(x)

        def forward(self, x: Any) -> Any:
            return self.encode(x)

    return Encoder()


def run_refusals(backend: Any) -> dict[str, str]:
    """Kind of mistake -> the error it ends in, or "no error"; the ranks stay together through all of them."""
    import torch

    import shardkit
    from tests.conformance.cases import Case, TokenLoss, batch_of, build_model, build_optimizer

    allow_accelerate_fsdp2()
    world = shardkit.World.current()
    found: dict[str, str] = {}

    def attempt(kind: str, action: Any) -> None:
        engines: list[Any] = []
        try:
            action(engines)
            found[kind] = "no error"
        except shardkit.ShardkitError as error:
            found[kind] = f"{type(error).__name__}: {error}"
        for engine in engines:
            engine.close()

    def opened(engines: list[Any], case: Case, make: Any = None, model: Any = None, precision: str = "fp32") -> Any:
        engines.append(
            shardkit.open_engine(
                backend,
                model or build_model(case),
                make or (lambda named: build_optimizer(case, named)),
                blocks=["blocks.*"] if model is None else [],
                precision=precision,
            )
        )
        return engines[-1]

    def window(case: Case, index: int = 0) -> list[Any]:
        return [batch_of(case, index, step[world.rank], world.device) for step in case.cells(index, world.size)]

    def unused(decay: float) -> Any:
        def action(engines: list[Any]) -> None:
            case = Case("unused", model="unused", optimizer="adamw", weight_decay=decay)
            engine = opened(engines, case)
            for index in range(3):
                shardkit.train_step(engine, window(case, index), TokenLoss())
            moved = 0.0
            fresh = dict(build_model(case).named_parameters())
            for i in engine.state():
                if i.kind == "parameter" and i.name.startswith("spare"):
                    was = fresh[i.name].detach().reshape(-1)[i.start : i.start + i.tensor.numel()]
                    moved = max(moved, float((was - i.tensor).abs().max()))
            found[f"moved by decay {decay}"] = str(moved)

        return action

    def nonfinite(engines: list[Any]) -> None:
        case = Case("nan", poison=0, windows=(16,), micro_batch_size=4)
        shardkit.train_step(opened(engines, case), window(case), TokenLoss(), step=7)

    def uneven(engines: list[Any]) -> None:
        case = Case("uneven", windows=(16,))
        engine = opened(engines, case)
        batches = window(case)
        shardkit.train_step(engine, batches + batches[:1] * world.rank, TokenLoss())

    def empty(engines: list[Any]) -> None:
        shardkit.train_step(opened(engines, Case("empty")), [], TokenLoss())

    def stranger(engines: list[Any]) -> None:
        other = torch.nn.Linear(2, 2)
        opened(engines, Case("stranger"), lambda named: torch.optim.SGD(other.parameters(), lr=0.1))

    def two_dtypes(engines: list[Any]) -> None:
        model = build_model(Case("plain"))
        next(iter(model.parameters())).data = next(iter(model.parameters())).data.to(torch.bfloat16)
        opened(engines, Case("plain"), model=model)

    def without_dimension(engines: list[Any]) -> None:
        model = torch.nn.Linear(2, 2)
        model.gain = torch.nn.Parameter(torch.tensor(1.0))
        opened(engines, Case("scalar"), model=model)

    def wrong_blocks(engines: list[Any]) -> None:
        engines.append(
            shardkit.open_engine(
                backend,
                build_model(Case("blocks")),
                lambda named: build_optimizer(Case("blocks"), named),
                blocks=["layers.*"],
            )
        )

    def adafactor(engines: list[Any]) -> None:
        opened(engines, Case("adafactor"), lambda named: torch.optim.Adafactor([p for _, p in named]))

    def nothing_to_train(engines: list[Any]) -> None:
        opened(engines, Case("frozen"), model=torch.nn.Linear(2, 2).requires_grad_(False))

    def bf16_true(engines: list[Any]) -> None:
        engine = opened(engines, Case("bf16-true"), precision="bf16-true")
        shardkit.train_step(engine, window(Case("bf16-true")), TokenLoss())
        kinds = {str(i.tensor.dtype) for i in engine.state() if i.kind != "buffer"}
        found["bf16-true dtypes"] = ",".join(sorted(kinds))

    def fp16(engines: list[Any]) -> None:
        opened(engines, Case("fp16"), precision="fp16-mixed")

    def second(engines: list[Any]) -> None:
        """Two engines in one process, each with its own settings."""
        case = Case("second", optimizer="sgd")
        first = opened(engines, case)
        other = opened(engines, case)
        a = shardkit.train_step(first, window(case), TokenLoss())
        b = shardkit.train_step(other, window(case), TokenLoss())
        found["second engine differs by"] = str(abs((a.loss or 0.0) - (b.loss or 0.0)))

    class Switched(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(13)
            self.layer, self.extra = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
            self.uses = True

        def forward(self, x: Any) -> Any:
            return self.layer(x) + self.extra(x) if self.uses else self.layer(x)

    def method(engines: list[Any]) -> None:
        """A loss that calls a method of the model, which no wrapper sees."""
        engine = opened(engines, Case("method"), model=make_encoder())
        value = torch.full((2, 3), float(world.rank + 1))
        moved = [p.detach().clone() for p in make_encoder().parameters()]
        try:
            shardkit.train_step(engine, [value], lambda model, batch: (model.encode(batch).sum(), len(batch)))
        except (RuntimeError, AttributeError) as error:
            found["method"] = type(error).__name__
            return
        # Not refused: then it must be right. The mean of rows (r + 1) over the ranks, at lr 0.1.
        want = moved[0] - 0.1 * (world.size + 1) / 2
        for i in engine.state():
            if i.name == "layer.weight" and i.kind == "parameter":
                own = want.reshape(-1)[i.start : i.start + i.tensor.numel()]
                assert torch.allclose(i.tensor, own, atol=1e-6), (i.tensor, own)
        found["method"] = "right"

    def sometimes(optimizer: Any) -> Any:
        def action(engines: list[Any]) -> None:
            """A parameter that only the first of three windows uses (layer drop, conditional heads)."""
            model = Switched()
            engine = opened(engines, Case("sometimes"), optimizer, model=model)
            for step in range(3):
                model.uses = step == 0
                value = torch.ones(2, 3)
                shardkit.train_step(engine, [value], lambda net, batch: (net(batch).sum(), len(batch)), step=step)
                if step == 0:
                    first = {i.name: i.tensor.clone() for i in engine.state() if i.kind == "parameter"}
            for i in engine.state():
                if i.kind == "parameter" and i.name.startswith("extra"):
                    found["sometimes moved"] = str(float((i.tensor - first[i.name]).abs().max()))

        return action

    def other_shapes(engines: list[Any]) -> None:
        opened(engines, Case("other"), model=torch.nn.Linear(3, 2 + world.rank))

    def strided(engines: list[Any]) -> None:
        model = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        opened(engines, Case("strided"), model=model)

    attempt("sometimes, sgd", sometimes(lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)))
    attempt("sometimes, adam", sometimes(lambda named: torch.optim.Adam([p for _, p in named], lr=0.1)))

    def dataclass_output(engines: list[Any]) -> None:
        case = Case("dataclass", output="dataclass")
        engine = opened(engines, case)
        for index in range(2):
            found["dataclass loss"] = str(shardkit.train_step(engine, window(case, index), TokenLoss()).loss)

    attempt("dataclass output", dataclass_output)
    attempt("other shapes", other_shapes)
    attempt("channels last", strided)
    attempt("method of the model", method)
    attempt("unused, decayed", unused(0.5))
    attempt("unused, not decayed", unused(0.0))
    attempt("nonfinite", nonfinite)
    attempt("uneven windows", uneven)
    attempt("empty window", empty)
    attempt("stranger in the optimizer", stranger)
    attempt("no dimension", without_dimension)
    attempt("two dtypes", two_dtypes)
    attempt("wrong blocks", wrong_blocks)
    attempt("adafactor", adafactor)
    attempt("nothing to train", nothing_to_train)
    attempt("bf16-true", bf16_true)
    attempt("fp16-mixed", fp16)
    attempt("second engine", second)
    return found


def assemble(results: list[dict[str, Any]]) -> dict[tuple[str, str, str | None], Any]:
    """Whole tensors from every rank's intervals; fails on a gap, or where replicas differ."""
    import math

    import torch

    whole: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    for result in results:
        for kind, name, state, shape, start, tensor, _dtype, _copies in result["state"]:
            key = (kind, name, state)
            if key not in whole:
                whole[key] = torch.zeros(math.prod(shape), dtype=tensor.dtype)
                seen[key] = torch.zeros(math.prod(shape), dtype=torch.bool)
            piece = slice(start, start + tensor.numel())
            overlap = seen[key][piece]
            if kind != "buffer":
                assert torch.equal(whole[key][piece][overlap], tensor[overlap].to(whole[key].dtype)), (
                    f"replicas differ: {key}"
                )
            whole[key][piece] = tensor
            seen[key][piece] = True
    for key, mask in seen.items():
        assert mask.all(), f"no rank holds elements of {key}"
    shapes = {(k, n, s): shape for r in results for k, n, s, shape, *_ in r["state"]}
    return {key: value.reshape(shapes[key]) for key, value in whole.items()}


def open_plain(backend: Any) -> None:
    """Open an engine as a user would, without the suite's switch."""
    import torch

    import shardkit

    shardkit.open_engine(backend, torch.nn.Linear(2, 2), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))


def run_norms(backend: Any, policy: Any, cells: list[list[list[int]]], dtype: str, steps: int = 1) -> dict[str, Any]:
    """One or more windows of a deep BatchNorm net; `cells[micro-step][rank]` are item numbers, [] = a filler.

    The gradient is read from SGD's momentum buffer, which it is after a first step.
    """
    import torch

    import shardkit
    from shardkit.normalization.statistics import merge_running_statistics
    from tests.conformance.norms import build_net, item_batch, squared_loss

    allow_accelerate_fsdp2()
    world = shardkit.World.current()
    wide = getattr(torch, dtype)
    model = build_net(wide)
    with count_collectives() as counted:
        engine = shardkit.open_engine(
            backend,
            model,
            # After a first step its buffer is the gradient.
            lambda named: torch.optim.SGD([p for _, p in named], lr=1.0, momentum=0.9),
            blocks=["blocks.*"],
            normalization=policy,
            micro_batch_size=4,
        )
        mine = [step[world.rank] for step in cells]
        window = [shardkit.MicroBatch(batch=item_batch(n or [0], wide), filler=not n, indices=tuple(n)) for n in mine]
        counted.clear()
        for step in range(steps):
            report = shardkit.train_step(engine, window, squared_loss, step=step)
        during = dict(counted)
        buffers = torch.cat([b.double().reshape(-1) for b in engine.model.buffers()])
        apart = bool((world.stack(buffers) != buffers).any())
        own = {name: b.detach().double().clone() for name, b in engine.model.named_buffers() if "running" in name}
        seen = engine.norms.items_seen
        merge_running_statistics(engine.model, world, items=seen)
        merged = [(value, engine.model.get_buffer(name)) for name, value in own.items()]
        weights = torch.tensor(world.gather(seen), dtype=torch.float64)[:, None]
        for index in range(0, len(merged), 2):
            # Each layer's mean, then its variance: what Chan's formula says of the ranks' own.
            (mean, now_mean), (variance, now_variance) = merged[index : index + 2]
            means, variances = world.stack(mean), world.stack(variance)
            pooled = (weights * means).sum(0) / weights.sum()
            spread = (weights * (variances + (means - pooled).square())).sum(0) / weights.sum()
            error = max((now_mean - pooled).abs().max().item(), (now_variance - spread).abs().max().item())
            assert error < (1e-12 if dtype == "float64" else 1e-6), error
        counted.clear()
        engine.model.eval()
        with engine.inference():
            squared_loss(engine.model, item_batch([0, 1], wide))
        evaluating = dict(counted)
    result = {
        "loss": report.loss,
        "during": during,
        "evaluating": evaluating,
        "apart before the evaluation": apart,
        "state": [
            (i.kind, i.name, i.state, i.shape, i.start, i.tensor.clone(), str(i.tensor.dtype), i.copies)
            for i in engine.state()
        ],
    }
    engine.close()
    return result


def count_collectives() -> Any:
    """Counts the calls that norms make on their own group."""
    from collections import Counter
    from contextlib import contextmanager

    import shardkit.normalization.batch_norm as layer
    import shardkit.normalization.normalize as function

    @contextmanager
    def counting() -> Any:
        counted: Counter[str] = Counter()
        real = layer.dist

        class Spy:
            def __getattr__(self, name: str) -> Any:
                found = getattr(real, name)
                if name not in ("all_gather", "all_reduce"):
                    return found

                def call(*arguments: Any, **named: Any) -> Any:
                    counted[name] += 1
                    return found(*arguments, **named)

                return call

        layer.dist = function.dist = Spy()  # type: ignore[assignment]
        try:
            yield counted
        finally:
            layer.dist = function.dist = real

    return counting()


def run_ledger(backend: Any) -> dict[str, Any]:
    """Two epochs of the digits recipe, made small, with a short last window; which samples this rank saw."""
    from pathlib import Path

    import torch

    import shardkit
    from shardkit.data.loader import Windows
    from shardkit.data.order import GlobalOrder
    from shardkit.engines.registry import options_of
    from shardkit.evaluation import evaluate
    from shardkit.losses import adapt
    from shardkit.recipe.build import build
    from shardkit.recipe.load import load

    allow_accelerate_fsdp2()
    root = Path(__file__).parents[2]
    recipe = load(
        root / "recipes" / "digits-resnet.yaml",
        ["batch.global_batch_size=300", "batch.micro_batch_size=50", "model.width=4", "data.drop_last=false"],
        options_of=options_of,
    ).recipe
    world = shardkit.World.current()
    torch.manual_seed(recipe.seed)
    train, held_out = build(recipe.data.train), build(recipe.data.eval)
    loss = adapt(build(recipe.loss))
    engine = shardkit.open_engine(
        backend,
        build(recipe.model),
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        max_grad_norm=recipe.train.max_grad_norm,
        micro_batch_size=recipe.batch.micro_batch_size,
    )
    place = {"world_size": world.size, "rank": world.rank, "micro_batch_size": recipe.batch.micro_batch_size}
    order = GlobalOrder(num_items=len(train), global_batch_size=recipe.batch.global_batch_size, seed=recipe.seed)
    windows = Windows(train, order=order, device=world.device, **place)
    epochs: list[list[int]] = [[], []]
    by_window: list[list[int]] = []
    micro_steps = 0
    for epoch in range(2):
        for window in windows.epoch(epoch):
            shardkit.train_step(engine, window, loss)
            by_window.append([number for batch in window for number in batch.indices])
            epochs[epoch] += by_window[-1]
            micro_steps += len(window)
    place["micro_batch_size"] = 70
    order = GlobalOrder.for_evaluation(len(held_out), world_size=world.size, micro_batch_size=70)
    scores = evaluate(engine, Windows(held_out, order=order, device=world.device, **place), loss)
    engine.close()
    return {
        "epochs": epochs,
        "windows": by_window,
        "items": len(train),
        "micro_steps": micro_steps,
        "eval items": scores.items,
    }
