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
# Where a test runs: (backends, worlds) in `make test`, and in `make test-slow`; a third party's engine runs the quick
# ones. Backends that end in the same engine are not all taken to worlds of more ranks than cores, where ZeRO-3 takes
# seconds a case.
EVERY = {
    "quick": [(None, (1, 2)), ({"ddp", "fsdp2", "hsdp", "zero2"}, (4,))],
    "slow": [
        ({"ddp", "fsdp2", "zero2", "zero3"}, (3,)),
        ({"zero1", "zero3", "accelerate-fsdp2", "accelerate-zero3"}, (4,)),
    ],
}
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
        where = getattr(metafunc.function, "where", EVERY)
        places: dict[str, Any] = {}
        for speed in ("quick", "slow"):
            for name in names:
                for chosen, worlds in where[speed]:
                    if chosen is None or name in chosen or (":" in name and speed == "quick"):
                        for world in worlds:
                            if _possible(name, world):
                                marks = () if speed == "quick" else pytest.mark.slow
                                place = pytest.param(name, world, marks=marks, id=f"{name}-{world}")
                                # What is quick is not slow as well.
                                places.setdefault(place.id, place)
        metafunc.parametrize(("backend", "world"), list(places.values()))
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", names)
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", ALL_CASES, ids=lambda case: case.name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a third party's engine only what is said of a backend: the rest is of the shipped ones, or of no backend."""
    if not any(":" in name for name in config.getoption("--backend")):
        return
    own = [item for item in items if "backend" in getattr(getattr(item, "callspec", None), "params", {})]
    config.hook.pytest_deselected(items=[item for item in items if item not in own])
    items[:] = own


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
    broken: dict[tuple[str, int], str] = {}

    def run(name: str, world: int) -> dict[str, Any]:
        if (name, world) in broken:
            pytest.fail(broken[name, world])
        if (name, world) not in kept:
            try:
                ranks = launch_ranks(world, "run_cases", backend_named(name), ALL_CASES)
            except pytest.fail.Exception as error:
                # Started once, also when it fails: every test that reads the run tells why.
                broken[name, world] = str(error)
                raise
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
