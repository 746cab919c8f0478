"""Options of a backend change where things lie and travel, never the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardkit.recipe.schema import Backend
from tests.conformance.cases import CASES
from tests.conformance.ranks import assemble
from tests.conformance.test_contracts import STATE, deviation

VARIANTS = [
    ("fsdp2", {"reshard_after_forward": False}),
    ("fsdp2", {"reshard_after_forward": False, "cpu_offload": True}),
    ("fsdp2", {"reduce_each_micro_step": True}),
    ("fsdp2", {"reduce_each_micro_step": True, "cpu_offload": True}),
    ("fsdp2", {"reduce_each_micro_step": True, "replicas": 2}),
    ("ddp", {"find_unused_parameters": True, "bucket_cap_mb": 0.001}),
    ("accelerate-ddp", {"find_unused_parameters": True}),
    ("accelerate-fsdp2", {"reshard_after_forward": False}),
    ("accelerate-fsdp2", {"reduce_each_micro_step": True}),
    ("deepspeed", {"stage": 1, "offload_optimizer": True}),
    ("deepspeed", {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 100}),
    ("deepspeed", {"stage": 2, "round_robin_gradients": True}),
    ("deepspeed", {"stage": 3, "stage3_prefetch_bucket_size": 10, "stage3_max_live_parameters": 10}),
    ("deepspeed", {"stage": 3, "stage3_max_reuse_distance": 1000000000}),
    ("deepspeed", {"stage": 3}),
]
CHOSEN = [case for case in CASES if case.name in ("ragged", "frozen", "groups", "evaluate", "skip", "clip")]


@pytest.mark.parametrize(("adapter", "options"), VARIANTS, ids=lambda value: str(value))
def test_an_option_does_not_change_the_numbers(
    launch_ranks: Callable[..., list[Any]], one_process: Any, adapter: str, options: dict[str, Any]
) -> None:
    ranks = launch_ranks(2, "run_cases", Backend(name=adapter, adapter=adapter, options=options), CHOSEN)
    for case in CHOSEN:
        want, results = one_process(case), [rank[case.name] for rank in ranks]
        whole = assemble(results)
        assert results[0]["losses"] == pytest.approx(want["losses"], rel=2e-6, nan_ok=True), case.name
        for name, value in want["weights"].items():
            assert deviation(whole["parameter", name, None], value) <= STATE, (case.name, name)
        for (name, key), value in want["moments"].items():
            assert deviation(whole["optimizer", name, key], value) <= STATE, (case.name, name, key)
