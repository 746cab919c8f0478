"""What a rank of the suite runs: all cases of one backend in one process group, returned as plain numbers."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

HANG_SECONDS = 240


def rank_main(rank: int, size: int, folder: str, function: str, arguments: tuple[Any, ...]) -> None:
    """Join the ranks through a file, run `function` of this module, and leave its result in `folder`."""
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
        if size > 1 or arguments[-1] == "group":
            store = dist.FileStore(str(Path(folder) / "store"), size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20)
            )
        outcome = ("ok", globals()[function](*arguments[:-1]))
    except BaseException as error:
        outcome = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(outcome))
    log.flush()
    # A group with a failed or absent member cannot be left in order; nothing else is to be kept.
    os._exit(0)


def run_cases(backend: Any, cases: list[Any]) -> dict[str, Any]:
    """Case name -> what this rank saw."""
    return {case.name: run_case(backend, case) for case in cases}


def run_case(backend: Any, case: Any) -> dict[str, Any]:
    import torch

    import shardkit
    from shardkit.engines import accelerate_fsdp2
    from tests.conformance.cases import TokenLoss, batch_of, build_model, build_optimizer

    # The switch of the suite: Accelerate's FSDP2 path on gloo ranks.
    accelerate_fsdp2.AccelerateFsdp2Engine.force_cpu = True
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
    result: dict[str, Any] = {"losses": [], "grad_norms": [], "skipped": [], "type": type(engine.model).__name__}
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
    result["state"] = [
        (i.kind, i.name, i.state, i.shape, i.start, i.tensor.float().clone(), str(i.tensor.dtype), i.replicated)
        for i in engine.state()
    ]
    engine.close()
    return result


def assemble(results: list[dict[str, Any]]) -> dict[tuple[str, str, str | None], Any]:
    """Whole tensors from every rank's intervals; fails on a gap, or where replicas differ."""
    import math

    import torch

    whole: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    for result in results:
        for kind, name, state, shape, start, tensor, _dtype, _replicated in result["state"]:
            key = (kind, name, state)
            if key not in whole:
                whole[key] = torch.full((math.prod(shape),), float("nan"))
                seen[key] = torch.zeros(math.prod(shape), dtype=torch.bool)
            piece = slice(start, start + tensor.numel())
            overlap = seen[key][piece]
            if kind != "buffer":
                assert torch.equal(whole[key][piece][overlap], tensor[overlap]), f"replicas differ: {key}"
            whole[key][piece] = tensor
            seen[key][piece] = True
            whole[key] = whole[key]
    for key, mask in seen.items():
        assert mask.all(), f"no rank holds elements of {key}"
    shapes = {(k, n, s): shape for r in results for k, n, s, shape, *_ in r["state"]}
    return {key: value.reshape(shapes[key]) for key, value in whole.items()}
