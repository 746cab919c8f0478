"""State of one backend and world, loaded into another: equal to the last bit, and the curve goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardkit import shipped
from shardkit.recipe.schema import Backend
from tests.conformance.conftest import backend_named
from tests.conformance.ranks import assemble
from tests.conformance.state_ranks import BY_OPTIMIZER, CASES, SAME_BACKEND, StateCase, expected_groups

# Where state comes from.
SOURCES = [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("zero3", 2)]
# Name -> a shipped backend with other options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1, round robin": ("zero1", {"round_robin_gradients": True}),
    "zero2, round robin": ("zero2", {"round_robin_gradients": True}),
    "zero1, offloaded": ("zero1", {"offload_optimizer": True}),
    "zero2, offloaded": ("zero2", {"offload_optimizer": True}),
    "zero3, whole parameters": ("zero3", {"stage3_param_persistence_threshold": 100_000}),
    "zero3, some whole": ("zero3", {"stage3_param_persistence_threshold": 10}),
    "zero3, offloaded": ("zero3-offload", {"stage3_param_persistence_threshold": 10}),
    "fsdp2, kept gathered": ("fsdp2", {"reshard_after_forward": False}),
    "ddp, some unused": ("ddp", {"find_unused_parameters": True}),
}
QUICK_VARIANTS = ("zero2, round robin", "zero3, some whole")
EVERYWHERE = sorted(shipped.files("backends"))


def opened_as(name: str) -> Backend:
    """A backend of the suite, or a variant of one."""
    base, options = VARIANTS.get(name, (name, {}))
    backend = backend_named(base)
    return replace(backend, options={**backend.options, **options})


def module(name: str) -> str:
    return f"tests.conformance.state_ranks:{name}"


@pytest.fixture(scope="session")
def saves(launch_ranks: Callable[..., list[Any]]) -> Callable[..., dict[str, Any]]:
    """`saves(backend, world, cases)`: case name -> a run's state in whole tensors, and how it went on."""
    kept: dict[tuple[str, int, str], dict[str, Any]] = {}

    def run(name: str, world: int, cases: list[StateCase]) -> dict[str, Any]:
        missing = [case for case in cases if (name, world, case.name) not in kept]
        if missing:
            ranks = launch_ranks(world, module("save_cases"), opened_as(name), missing)
            for case in missing:
                kept[name, world, case.name] = gathered([rank[case.name] for rank in ranks])
        return {case.name: kept[name, world, case.name] for case in cases}

    return run


def gathered(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole tensors and all numbers of a run, and what its first rank reported."""
    scalars: dict[str, Any] = {}
    for rank in ranks:
        for name, values in rank["scalars"].items():
            assert scalars.setdefault(name, values) == values, f"ranks keep different numbers for {name}"
    check_copies(ranks)
    # Rank 0's buffers, where they differ: the last one that is written.
    assert all(rank["groups"] == ranks[0]["groups"] for rank in ranks)
    return {**ranks[0], "state": None, "whole": assemble(ranks[::-1]), "scalars": scalars, "ranks": ranks}


def check_copies(ranks: list[dict[str, Any]]) -> None:
    """As many ranks hold an interval as it says copies, each another one."""
    held: dict[Any, list[int]] = {}
    for rank in ranks:
        for *key, copy in rank["copy"]:
            held.setdefault(tuple(key), []).append(copy)
    copies = {(k, n, s, start): c for rank in ranks for k, n, s, _, start, _, _, c in rank["state"]}
    assert {key: sorted(found) for key, found in held.items()} == {key: list(range(n)) for key, n in copies.items()}


def load(launch_ranks: Any, name: str, world: int, jobs: list[tuple[StateCase, dict[str, Any]]]) -> dict[str, Any]:
    """Case -> source -> result, in whole tensors."""
    slim = [
        (case, {source: {key: saved[key] for key in ("whole", "scalars")} for source, saved in sources.items()})
        for case, sources in jobs
    ]
    ranks = launch_ranks(world, module("load_cases"), opened_as(name), pickle.dumps(slim))
    return {
        case.name: {source: gathered([rank[case.name][source] for rank in ranks]) for source in sources}
        for case, sources in jobs
    }


def check(case: StateCase, saved: dict[str, Any], loaded: dict[str, Any], same_backend: bool) -> None:
    where = f"case {case.name}"
    assert loaded["groups"] == expected_groups(case), where
    # A group of one flat partition shows zeros for parameters that had no state.
    extra = {key: value for key, value in loaded["whole"].items() if key not in saved["whole"]}
    assert all(key[0] == "optimizer" and not value.any() for key, value in extra.items()), (where, list(extra))
    for key, whole in saved["whole"].items():
        assert loaded["whole"][key].dtype == whole.dtype, (where, key)
        assert torch.equal(loaded["whole"][key], whole), (where, key)
    if not extra:
        assert loaded["scalars"] == saved["scalars"], where
    for rank in loaded["ranks"]:
        difference = (rank["output"] - saved["output"]).abs().max().item()
        assert difference <= (0 if same_backend else 1e-6), (where, difference)
    if case.model != "batchnorm":
        deviation = max(abs(a - b) / abs(b) for a, b in zip(loaded["losses"], saved["losses"], strict=True))
        assert deviation <= (2e-7 if case.precision == "fp32" else 2e-3), (where, deviation)


def check_all(
    launch_ranks: Any, saves: Any, target: tuple[str, int], sources: list[tuple[str, int]], cases: list[StateCase]
) -> None:
    check_some(launch_ranks, saves, target, dict.fromkeys(sources, cases))


def check_some(
    launch_ranks: Any, saves: Any, target: tuple[str, int], wanted: dict[tuple[str, int], list[StateCase]]
) -> None:
    """Load the cases of each source into one target, which is opened once a case."""
    by_case: dict[StateCase, dict[str, Any]] = {}
    for (name, world), cases in wanted.items():
        found = saves(name, world, cases)
        for case in cases:
            by_case.setdefault(case, {})[f"{name}-{world}"] = found[case.name]
    jobs = list(by_case.items())
    results = load(launch_ranks, *target, jobs)
    for case, by_source in jobs:
        for source, saved in by_source.items():
            try:
                check(case, saved, results[case.name][source], same_backend=source.rpartition("-")[0] == target[0])
            except AssertionError as error:
                raise AssertionError(f"{source} -> {target[0]}-{target[1]}: {error}") from error


def test_state_goes_from_every_kind_of_backend_to_every_other(
    backend: str, world: int, launch_ranks: Any, saves: Any
) -> None:
    # A third party's engine need not find the other backends installed.
    sources = SOURCES[:2] if ":" in backend else SOURCES
    wanted = {source: CASES if source in (("single", 1), ("zero3", 2)) else CASES[:1] for source in sources}
    check_some(launch_ranks, saves, (backend, world), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("target", [("ddp", 2), ("fsdp2", 3), ("hsdp", 2), ("zero2", 3), ("zero3", 2)], ids=str)
def test_every_case_goes_everywhere(target: tuple[str, int], launch_ranks: Any, saves: Any) -> None:
    check_all(launch_ranks, saves, target, SOURCES, CASES[1:])


test_state_goes_from_every_kind_of_backend_to_every_other.where = {  # type: ignore[attr-defined]
    "quick": [({"single"}, (1,)), ({"fsdp2", "zero2", "zero3"}, (2,)), ({"ddp"}, (3,)), ({"hsdp"}, (4,))],
    "slow": [(None, (1, 2, 3))],
}


def test_every_optimizer_is_carried(backend: str, world: int, launch_ranks: Any, saves: Any) -> None:
    check_all(launch_ranks, saves, (backend, world), [("ddp", 2)], BY_OPTIMIZER)


test_every_optimizer_is_carried.where = {  # type: ignore[attr-defined]
    "quick": [({"fsdp2", "zero2"}, (2,))],
    "slow": [(None, (2,)), ({"single"}, (1,))],
}


@pytest.mark.slow
@pytest.mark.parametrize("source", [("fsdp2", 3), ("zero2", 3), ("zero3", 2)], ids=str)
def test_every_optimizer_comes_back(source: tuple[str, int], launch_ranks: Any, saves: Any) -> None:
    check_all(launch_ranks, saves, ("ddp", 2), [source], BY_OPTIMIZER)


def test_the_first_output_after_a_load_is_the_savers(backend: str, world: int, launch_ranks: Any, saves: Any) -> None:
    """bf16 shows weights that were not refreshed, and BatchNorm rank 0's buffers."""
    zero = "zero" in backend
    cases = [case for case in SAME_BACKEND if zero or not case.patch]
    cases = [case for case in cases if not zero or case.precision != "bf16-true"]
    check_all(launch_ranks, saves, (backend, world), [(backend, 2)], cases)


test_the_first_output_after_a_load_is_the_savers.where = {  # type: ignore[attr-defined]
    "quick": [({"ddp", "fsdp2", "zero2", "zero3"}, (2,))],
    "slow": [(set(EVERYWHERE) - {"single"}, (2,)), ({"fsdp2", "zero2", "zero3"}, (3,))],
}


@pytest.mark.parametrize(
    "variant",
    [name if name in QUICK_VARIANTS else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
)
def test_a_backends_options_change_no_state(variant: str, launch_ranks: Any, saves: Any) -> None:
    """Options that lay the same state out in another way: into it, and out of it."""
    cases = [case for case in CASES if case.name == "frozen"]
    check_all(launch_ranks, saves, (variant, 2), [("single", 1), ("ddp", 2)], cases)
    check_all(launch_ranks, saves, ("ddp", 2), [(variant, 2)], cases)


def test_what_cannot_be_shown_or_loaded_is_refused(backend: str, world: int, launch_ranks: Any) -> None:
    zero = "zero" in backend
    for found in launch_ranks(world, module("state_traps"), opened_as(backend)):
        for quiet in ("at start", "after a step", "after the window", "after a skipped step"):
            assert found[quiet] == "no error", quiet
        for refused in ("state while pending", "load while pending"):
            assert "gradients of an unfinished window are pending" in found[refused], found[refused]
        assert "does not train: nobody.weight" in found["unknown name"]
        if zero:
            assert "'step'" in found["different numbers"] and "blocks.1.down.weight" in found["different numbers"]
            assert found["DeepSpeed's own view"]
            assert len(found["planted"]) == 1
            for error, name in zip(found["planted"], found["planted in"], strict=True):
                assert error.startswith(f"EngineError: {name}: the weights"), error
            assert found["not planted"] == "no error"
        else:
            assert found["numbers"] == [3.0, 77.0]
        if zero or "fsdp2" in backend:
            assert "'exp_avg'" in found["other shape"] and "(3,)" in found["other shape"]
        for unchanged in ("refusals changed nothing", "nothing loaded, nothing changed", "loaded while gathered"):
            assert found[unchanged], unchanged


test_what_cannot_be_shown_or_loaded_is_refused.where = {  # type: ignore[attr-defined]
    "quick": [({"single"}, (1,)), ({"ddp", "fsdp2", "zero2", "zero3"}, (2,))],
    "slow": [(None, (2,))],
}


def test_zero_knows_after_a_load_what_its_momentum_would_move(launch_ranks: Any) -> None:
    for found in launch_ranks(2, module("unused_after_load"), opened_as("zero2")):
        assert "extra.weight" in found["used before"]
        assert found["never used"] == "no error"


@pytest.mark.parametrize("optimizer", ["momentum", "adafactor", "adamw-fused"])
@pytest.mark.parametrize("place", [("single", 1), ("ddp", 2)], ids=str)
def test_replicas_carry_what_has_no_rows(place: tuple[str, int], optimizer: str, launch_ranks: Any) -> None:
    name, world = place
    backend = opened_as("ddp, some unused" if name == "ddp" else name)
    for found in launch_ranks(world, module("odd_tensors"), backend, optimizer):
        assert found["equal"]
        assert found["next"][0] == found["next"][1]
        assert None in found["copied"]
        shapes, scalars = found["shapes"], found["scalars"]
        assert ("buffer", None) not in shapes and not any(name == "dropped" for name, _ in shapes)
        assert shapes["gain", None] == () and shapes["kept", None] == (3,)
        assert not any(name == "never" and key for name, key in shapes) and "never" not in scalars
        if optimizer == "adafactor":
            assert shapes["conv.weight", "row_var"] == (6, 4, 3, 1)
        if optimizer == "momentum":
            assert "momentum_buffer" in found["copied"] and scalars["gain"] == ["momentum_buffer"]


def test_a_shard_along_any_dim_is_a_set_of_intervals(launch_ranks: Any) -> None:
    for rank, found in enumerate(launch_ranks(2, module("along_any_dim"))):
        assert all(same for _, _, same in found)
        # (3, 5, 4): a block of rows, a run for each of 3, and for each of 3 * 5.
        assert [count for _, count, _ in found] == [1, 3, 15], rank
