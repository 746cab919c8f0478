"""Accumulation in plain numbers (traps B01 to B11, B44, B56, B94): SGD with lr 1 on one weight, start 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardkit.engines import registry
from shardkit.recipe.backend import load_backend
from tests.conformance.conftest import ONE_PROCESS, backend_named

# [window][micro-step] of numbers dL/dw; one item each.
SHORT_LAST = [[1.0, 2.0], [4.0], [8.0, 16.0], [32.0]]


def world_of(backend: str) -> int:
    if ":" not in backend and load_backend(backend, options_of=registry.options_of).adapter in ONE_PROCESS:
        return 1
    return 2


@pytest.fixture(scope="module")
def numbers(launch_ranks: Callable[..., list[Any]]) -> Callable[..., dict[str, Any]]:
    kept: dict[Any, Any] = {}

    def run(backend: str, windows: Any, **options: Any) -> dict[str, Any]:
        key = (backend, str(windows), str(options))
        if key not in kept:
            world = world_of(backend)
            # The same numbers on each rank, unless they are given by rank.
            ranked = [w if isinstance(w[0], list) else [[[n] for n in w]] * world for w in windows]
            kept[key] = launch_ranks(world, "run_numbers", backend_named(backend), ranked, *options.values())[0]
        return kept[key]

    return run


def test_a_short_window_is_divided_by_what_it_holds(numbers: Any, backend: str) -> None:
    # B01 to B05, B09: the mean of each window, no window spills into the next, none is scaled twice.
    assert numbers(backend, SHORT_LAST)["weights"] == pytest.approx([-1.5, -5.5, -17.5, -49.5], abs=1e-5)


def test_nothing_is_clipped_when_no_one_asked(numbers: Any, backend: str) -> None:
    # B44: DeepSpeed clips at 1.0 when its configuration does not say otherwise.
    assert numbers(backend, SHORT_LAST)["grad_norms"] == pytest.approx([1.5, 4.0, 12.0, 32.0], rel=1e-6)


def test_the_normaliser_is_global(numbers: Any, backend: str) -> None:
    # B10, B11: rank 0 has 3 items of 1, rank 1 one item of 5: (3 * 1 + 5) / 4, not a mean of means.
    windows = [[[[1.0, 1.0, 1.0], [5.0]]]] if world_of(backend) == 1 else [[[[1.0, 1.0, 1.0]], [[5.0]]]]
    assert numbers(backend, windows)["weights"] == pytest.approx([-2.0], abs=1e-6)


def test_a_scheduler_steps_once_an_optimizer_step(numbers: Any, backend: str) -> None:
    # B08, B56: not once a micro-batch, not once a process.
    result = numbers(backend, [[1.0] * 4, [1.0] * 4, [1.0] * 4], halving=True)
    assert result["lr"] == [1.0, 0.5, 0.25]
    assert result["weights"] == pytest.approx([-1.0, -1.5, -1.75], abs=1e-6)


def test_small_gradients_survive_accumulation_in_bf16(numbers: Any, backend: str) -> None:
    # B94: 64 + 0.25 is 64 in bf16; gradients must add up in fp32.
    result = numbers(backend, [[256.0, 1.0, 1.0, 1.0]], halving=False, precision="bf16-mixed")
    assert result["grad_norms"] == pytest.approx([64.75], rel=1e-6)


def test_a_window_without_a_valid_item_is_skipped_on_all_ranks(numbers: Any, backend: str) -> None:
    # B92: no division by zero, no update, and the next window is right.
    ranks = world_of(backend)
    result = numbers(backend, [[[[1.0]]] * ranks, [[[], []]] * ranks, [[[2.0], []]] * ranks])
    assert result["weights"] == pytest.approx([-1.0, -1.0, -3.0], abs=1e-6)
    assert result["skipped"] == [False, True, False] and result["losses"][1] is None


def test_variables_of_the_environment_change_nothing(numbers: Any, backend: str) -> None:
    # B57, B58: Accelerate lets them beat its arguments.
    environment = {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0",
        "ACCELERATE_SPLIT_BATCHES": "true",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    }
    result = numbers(backend, SHORT_LAST, halving=False, precision="fp32", environment=environment)
    assert result["weights"] == pytest.approx([-1.5, -5.5, -17.5, -49.5], abs=1e-5)
    assert result["grad_norms"] == pytest.approx([1.5, 4.0, 12.0, 32.0], rel=1e-6)
