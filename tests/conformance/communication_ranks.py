"""What a rank does in the tests of communication and meaning: steps that are counted, engines that are looked at."""

from __future__ import annotations

from typing import Any

SETTLED = 3
# From this step on, the libraries have made their plans.


def count_steps(backend: Any, cases: list[Any]) -> dict[str, dict[str, tuple[int | None, int]]]:
    """Case name -> kind -> (calls, bytes) of a settled step."""
    return {case.name: _count(backend, case) for case in cases}


def _count(backend: Any, case: Any) -> dict[str, tuple[int | None, int]]:
    import shardkit
    from shardkit.communication import counted
    from tests.conformance.cases import TokenLoss, batch_of

    engine = open_case(backend, case)
    world, taken = engine.world, {}
    with counted() as counts:
        for window in range(SETTLED):
            counts.take()
            micro_batches = [
                shardkit.MicroBatch(
                    batch=batch_of(case, window, step[world.rank], world.device),
                    filler=False,
                    indices=tuple(step[world.rank]),
                )
                for step in case.cells(window, world.size)
            ]
            shardkit.train_step(engine, micro_batches, TokenLoss(), step=window + 1)
            taken = counts.take()
    engine.close()
    return {kind: (volume.calls, volume.bytes) for kind, volume in taken.items()}


def open_case(backend: Any, case: Any) -> Any:
    import shardkit
    from tests.conformance.cases import build_model, build_optimizer
    from tests.conformance.ranks import allow_accelerate_fsdp2

    allow_accelerate_fsdp2()
    return shardkit.open_engine(
        backend,
        build_model(case),
        lambda named: build_optimizer(case, named),
        max_grad_norm=case.max_grad_norm,
        precision=case.precision,
        blocks=["blocks.*"],
        activation_checkpointing=case.activation_checkpointing,
        normalization=case.name if case.name in ("sync", "deferred", "exact") else "keep",
        micro_batch_size=case.micro_batch_size,
    )


def live(backend: Any, cases: list[Any]) -> dict[str, dict[str, Any]]:
    """Case name -> what an engine holds, computes with and reduces in."""
    return {case.name: _live(backend, case) for case in cases}


def _live(backend: Any, case: Any) -> dict[str, Any]:
    import torch

    import shardkit
    from shardkit.engines.meaning import short
    from tests.conformance.cases import TokenLoss, batch_of

    engine = open_case(backend, case)
    seen: dict[str, Any] = {"computed": set(), "gathered": set()}

    def look(module: Any, inputs: Any, output: Any) -> None:
        seen["computed"].add(short(output.dtype))
        seen["gathered"].add(short(module.weight.dtype))

    hooks = [m.register_forward_hook(look) for m in engine.model.modules() if isinstance(m, torch.nn.Linear)]
    rank = engine.world.rank
    numbers = case.cells(0, engine.world.size)[0][rank]
    batch = batch_of(case, 0, numbers, engine.world.device)
    reduced = _reduced_dtypes(
        lambda: shardkit.train_step(
            engine, [shardkit.MicroBatch(batch=batch, filler=False, indices=tuple(numbers))], TokenLoss()
        )
    )
    for hook in hooks:
        hook.remove()
    seen["storage"] = {short(p.dtype) for p in engine.model.parameters()}
    intervals = list(engine.state())
    seen["masters"] = {short(i.tensor.dtype) for i in intervals if i.kind == "parameter"}
    seen["statistics"] = {
        short(i.tensor.dtype) for i in intervals if i.kind == "buffer" and i.tensor.dtype.is_floating_point
    }
    seen["reduced"] = reduced
    engine.close()
    return seen


def _reduced_dtypes(step: Any) -> set[str]:
    """Dtypes of what an all-reduce or a reduce-scatter of more than a few numbers takes in."""
    import torch

    from shardkit.engines.meaning import short

    found: set[str] = set()
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(called: Any, argument: int) -> Any:
        def run(keyset: Any, *arguments: Any) -> Any:
            value = arguments[argument]
            for tensor in value if isinstance(value, list) else [value]:
                if tensor.numel() > 64:
                    found.add(short(tensor.dtype))
            return called.redispatch(keyset & rest, *arguments)

        return run

    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name, argument in (("allreduce_", 0), ("_reduce_scatter_base_", 1)):
            called = getattr(torch.ops.c10d, name).default
            library.impl(name, kernel(called, argument), "BackendSelect", with_keyset=True)
        step()
    return found


def count_kinds() -> dict[str, Any]:
    """One collective of each kind, in a context around another."""
    import torch
    import torch.distributed as dist

    from shardkit import communication
    from shardkit.communication import counted

    rank = dist.get_rank()

    def tensor() -> torch.Tensor:
        return torch.ones(6)

    with counted() as outer:
        dist.all_reduce(tensor())
        dist.broadcast(tensor(), src=0)
        dist.reduce(tensor(), dst=0)
        dist.all_gather([tensor(), tensor()], tensor())
        dist.all_gather_into_tensor(torch.empty(12), tensor())
        dist.reduce_scatter_tensor(torch.empty(3), tensor())
        dist.gather(tensor(), [tensor(), tensor()] if rank == 0 else None, dst=0)
        dist.scatter(tensor(), [tensor(), tensor()] if rank == 0 else None, src=0)
        dist.all_to_all_single(torch.empty(6), tensor())
        dist.barrier()
        if rank == 0:
            dist.send(tensor(), 1)
        else:
            dist.recv(tensor(), 0)
        with counted() as inner:
            dist.all_reduce(tensor())
        with outer.paused():
            dist.all_reduce(tensor())
        # A group of one rank moves nothing.
        alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
        dist.all_reduce(tensor(), group=alone)
        taken = outer.take()
    dist.all_reduce(tensor())
    return {
        "rank": rank,
        "outer": {kind: (volume.calls, volume.bytes) for kind, volume in taken.items()},
        "inner": {kind: (volume.calls, volume.bytes) for kind, volume in inner.take().items()},
        "after": outer.take(),
        "kernels": sum(
            torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect")
            for name in communication._OPERATORS
        ),
    }
