"""Which backends the suite runs on, and their runs: once each, read by many tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardkit import shipped
from shardkit.engines import registry
from shardkit.recipe.backend import load_backend
from shardkit.recipe.schema import Backend
from tests.conformance.cases import BF16, BF16_BATCHNORM, CASES, Case
from tests.conformance.ranks import assemble
from tests.conformance.reference import reference

ALL_CASES = [*CASES, BF16, BF16_BATCHNORM]
# Worlds that run in `make test`; the others are marked slow. ZeRO-3 takes seconds a case on more ranks than cores.
QUICK = {1, 2}
QUICK_ON_FOUR = {"ddp", "fsdp2", "hsdp", "zero2"}
ONE_PROCESS = {name for name, adapter in registry.BUILT_IN.items() if adapter.one_process}


def backend_named(name: str) -> Backend:
    """A shipped preset as the suite runs it, or a third party's engine."""
    backend = load_backend(name, options_of=registry.options_of)
    if backend.options.get("stage") == 3:
        # Whole parameters are not sharded ones: at the default, none of the suite's would be.
        return replace(backend, options={**backend.options, "stage3_param_persistence_threshold": 0})
    return backend


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.config.getoption("--backend") or sorted(shipped.files("backends"))
    if "world" in metafunc.fixturenames:
        # A test says `worlds` and `quick` where it differs.
        quick = getattr(metafunc.function, "quick", QUICK)
        places = [
            pytest.param(
                name, world, marks=() if _quick(name, world, quick) else pytest.mark.slow, id=f"{name}-{world}"
            )
            for name in names
            for world in getattr(metafunc.function, "worlds", (1, 2, 3, 4))
            if _possible(name, world)
        ]
        metafunc.parametrize(("backend", "world"), places)
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", names)
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", ALL_CASES, ids=lambda case: case.name)


def _quick(name: str, world: int, quick: set[int]) -> bool:
    return world in quick or (world == 4 and name in QUICK_ON_FOUR)


def _possible(name: str, world: int) -> bool:
    if ":" in name:
        return True
    backend = load_backend(name, options_of=registry.options_of)
    if backend.adapter in ONE_PROCESS:
        return world == 1
    return world % backend.options.get("replicas", 1) == 0


@pytest.fixture(scope="session")
def runs(launch_ranks: Callable[..., list[Any]]) -> Callable[[str, int], dict[str, Any]]:
    """`runs(backend, world)`: case name -> results of all ranks; the ranks are started once."""
    kept: dict[tuple[str, int], dict[str, Any]] = {}

    def run(name: str, world: int) -> dict[str, Any]:
        if (name, world) not in kept:
            # All failures of one start are told by the first test that reads it.
            ranks = launch_ranks(world, "run_cases", backend_named(name), ALL_CASES)
            kept[name, world] = {case.name: {"ranks": [rank[case.name] for rank in ranks]} for case in ALL_CASES}
            for result in kept[name, world].values():
                result["whole"] = assemble(result["ranks"])
        return kept[name, world]

    return run


@pytest.fixture(scope="session")
def one_process() -> Callable[[Case], dict[str, Any]]:
    """`one_process(case)`: the same case by plain torch."""
    kept: dict[str, dict[str, Any]] = {}

    def run(case: Case) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)
        if case.name not in kept:
            kept[case.name] = reference(case)
        return kept[case.name]

    return run
