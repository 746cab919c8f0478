"""C5: statistics of the batch that is meant, on every backend: exact, sync, deferred, and merged running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardkit.recipe.schema import Exact, Normalization
from tests.conformance.conftest import backend_named
from tests.conformance.norms import LAYERS, large_batch
from tests.conformance.ranks import assemble
from tests.conformance.test_refusals import traits_of

NORMS = 2 * LAYERS + 1
# ZeRO holds fp32 only.
WIDE = {"single", "ddp", "fsdp2", "fsdp2-offload", "hsdp", "accelerate-ddp", "accelerate-fsdp2"}

Cells = list[list[list[int]]]


def window_of(world: int) -> Cells:
    """Eight micro-steps of uneven micro-batches; on four ranks the last one has no item at all."""
    sizes = {1: [3, 1, 4, 2, 3, 1, 2, 4], 2: [2, 1, 2, 1, 2, 1, 1, 2], 4: [1, 2, 1, 1, 2, 1, 1, 1]}[world]
    cells, number = [], 0
    for step, size in enumerate(sizes):
        row = []
        for rank in range(world):
            n = 0 if world == 4 and rank == 3 else size + (step + rank) % 2
            row.append(list(range(number, number + n)))
            number += n
        cells.append(row)
    return cells


def one_step(world: int) -> Cells:
    """One micro-step; uneven, and empty on the last of three ranks or more."""
    sizes = {1: [7], 2: [5, 2], 4: [4, 1, 3, 0]}[world]
    cells, number = [], 0
    for n in sizes:
        cells.append(list(range(number, number + n)))
        number += n
    return [cells]


def items(cells: Cells) -> list[int]:
    return sorted(number for step in cells for rank in step for number in rank)


@pytest.fixture(scope="module")
def norm_runs(launch_ranks: Callable[..., list[Any]]) -> Callable[..., tuple[list[Any], dict[Any, Any]]]:
    kept: dict[Any, Any] = {}

    def run(backend: str, policy: Any, cells: Cells, **more: Any) -> tuple[list[Any], dict[Any, Any]]:
        key = (backend, str(policy), str(cells), str(more))
        if key not in kept:
            dtype = "float64" if backend in WIDE else "float32"
            ranks = launch_ranks(
                len(cells[0]), "run_norms", backend_named(backend), policy, cells, dtype, *more.values()
            )
            kept[key] = ranks, assemble(ranks)
        return kept[key]

    return run


def gradient_error(whole: dict[Any, Any], cells: Cells) -> float:
    """The largest difference of a gradient from the fp64 large batch's, relative to the largest of its tensor."""
    worst = 0.0
    for name, parameter in large_batch(items(cells), torch.float64)[0].named_parameters():
        want = parameter.grad
        assert want is not None
        got = whole["optimizer", name, "momentum_buffer"].double()
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    return worst


def statistics_error(whole: dict[Any, Any], cells: Cells) -> float:
    want = dict(large_batch(items(cells), torch.float64)[0].named_buffers())
    return max(
        float((whole["buffer", name, None].double() - value).abs().max())
        for name, value in want.items()
        if "running" in name
    )


def test_exact_gives_the_gradient_of_the_large_batch(norm_runs: Any, backend: str, world: int) -> None:
    cells = window_of(world)
    ranks, whole = norm_runs(backend, "exact", cells)
    wide = backend in WIDE
    assert gradient_error(whole, cells) <= (1e-12 if wide else 5e-6)
    assert statistics_error(whole, cells) <= (1e-12 if wide else 1e-6)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(large_batch(items(cells), torch.float64)[1], rel=1e-6)
        for kind, name, _, _, _, tensor, *_ in rank["state"]:
            if kind == "buffer" and name.endswith("num_batches_tracked"):
                assert tensor.item() == 1


def test_exact_at_constant_memory_gives_the_same_gradient(norm_runs: Any, backend: str, world: int) -> None:
    cells = window_of(world)
    policy = Normalization(policy="exact", exact=Exact(memory="constant"))
    if not traits_of(backend).constant_memory:
        with pytest.raises(pytest.fail.Exception, match=r"BackendError.*use memory: blocks"):
            norm_runs(backend, policy, cells)
        return
    _, whole = norm_runs(backend, policy, cells)
    wide = backend in WIDE
    assert gradient_error(whole, cells) <= (1e-12 if wide else 5e-6)
    assert statistics_error(whole, cells) <= (1e-12 if wide else 1e-6)


def test_ordinary_accumulation_does_not(norm_runs: Any, backend: str, world: int) -> None:
    # So that the test above can fail.
    cells = window_of(world)
    _, whole = norm_runs(backend, "keep", cells)
    assert gradient_error(whole, cells) > 1e-2


def test_sync_is_the_batch_of_all_ranks(norm_runs: Any, backend: str, world: int) -> None:
    # B17, B18, B22: uneven and empty ranks.
    cells = one_step(world)
    ranks, whole = norm_runs(backend, "sync", cells)
    wide = backend in WIDE
    assert gradient_error(whole, cells) <= (1e-12 if wide else 5e-6)
    assert statistics_error(whole, cells) <= (1e-12 if wide else 1e-6)
    for rank in ranks:
        assert rank["loss"] == pytest.approx(large_batch(items(cells), torch.float64)[1], rel=1e-6)


def test_collectives_are_two_a_layer(norm_runs: Any, backend: str, world: int) -> None:
    calls = {"all_gather": NORMS, "all_reduce": NORMS} if world > 1 else {}
    for rank in norm_runs(backend, "sync", one_step(world))[0]:
        assert rank["during"] == calls and rank["evaluating"] == {}
    # Once a window, not once a micro-step.
    for rank in norm_runs(backend, "exact", window_of(world))[0]:
        assert rank["during"] == calls and rank["evaluating"] == {}


def test_deferred_moves_running_statistics_once_to_those_of_the_window(
    norm_runs: Any, backend: str, world: int
) -> None:
    cells = window_of(world)
    ranks, whole = norm_runs(backend, "deferred", cells)
    want = dict(large_batch(items(cells), torch.float64)[0].named_buffers())
    # What comes before the first norm does not depend on statistics: its input is the large batch's.
    for name in ("norm.running_mean", "norm.running_var"):
        error = (whole["buffer", name, None].double() - want[name]).abs().max().item()
        assert error <= (1e-12 if backend in WIDE else 1e-6)
    for rank in ranks:
        for kind, name, _, _, _, tensor, *_ in rank["state"]:
            if kind == "buffer" and name.endswith("num_batches_tracked"):
                assert tensor.item() == 1
            if kind == "buffer":
                assert torch.equal(tensor.reshape(-1), whole["buffer", name, None].reshape(-1).to(tensor.dtype))


def test_running_statistics_agree_over_the_ranks_after_an_evaluation(norm_runs: Any, backend: str, world: int) -> None:
    # B14, B15: policy keep; before, each rank has its own.
    ranks, _ = norm_runs(backend, "keep", window_of(world))
    first = {name: tensor for kind, name, _, _, _, tensor, *_ in ranks[0]["state"] if kind == "buffer"}
    for rank in ranks:
        for kind, name, _, _, _, tensor, *_ in rank["state"]:
            if kind == "buffer":
                assert torch.equal(tensor, first[name]), name
        assert rank["apart before the evaluation"] is (world > 1)


WHERE = {
    "quick": [({"ddp", "fsdp2", "zero3"}, (2,))],
    "slow": [
        (None, (2,)),
        ({"single", "ddp"}, (1,)),
        ({"ddp", "fsdp2", "zero1", "zero2", "zero3", "accelerate-fsdp2"}, (4,)),
    ],
}
for test in list(globals().values()):
    if callable(test) and getattr(test, "__name__", "").startswith("test_"):
        test.where = WHERE
