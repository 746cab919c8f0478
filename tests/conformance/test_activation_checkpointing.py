"""Recomputing blocks in the backward changes no number, moves no byte more and counts no batch twice, anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import backend_named
from tests.conformance.test_contracts import BF16_RELATIVE, RELATIVE
from tests.conformance.test_refusals import traits_of

RANKS = "tests.conformance.activation_ranks:"
VARIANTS = ["plain", "dropout", "frozen", "keep", "exact", "tied", "sync", "deferred", "frozen-norms"]
HALF = ["bf16", "bf16-batchnorm"]
SLOW = VARIANTS[5:]
# Not on stage 3, which takes longer to open than all others together; policies are the same to it.
WHERE = {
    "quick": [({"single"}, (1,)), ({"ddp", "fsdp2", "zero2"}, (2,))],
    "slow": [(None, (1, 2)), ({"ddp", "fsdp2", "zero3"}, (4,))],
}


def somewhere(test: Any) -> Any:
    test.where = WHERE
    return test


@pytest.fixture(scope="module")
def compared(launch_ranks: Callable[..., list[Any]]) -> Callable[[str, int], list[dict[str, Any]]]:
    """`compared(backend, world)`: what each rank saw of each variant; the ranks are started once."""
    kept: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def run(name: str, world: int) -> list[dict[str, Any]]:
        if (name, world) not in kept:
            backend = backend_named(name)
            variants = [*VARIANTS, *(HALF if "bf16-mixed" in traits_of(name).precisions else [])]
            if backend.options.get("stage") == 3:
                variants = [variant for variant in variants if variant not in SLOW]
            kept[name, world] = launch_ranks(world, f"{RANKS}compare", backend, variants)
        return kept[name, world]

    return run


@somewhere
def test_losses_norms_and_state_are_those_of_the_run_without_it(compared: Any, backend: str, world: int) -> None:
    for rank in compared(backend, world):
        for name, seen in rank.items():
            half = name in HALF
            assert max(seen["apart"]) <= (BF16_RELATIVE if half else RELATIVE), name
            if not half:
                assert max(seen["state apart"]) <= 5e-6, name
            if backend == "single":
                assert not any(seen["apart"]) and not any(seen["state apart"]), name


@somewhere
def test_blocks_are_computed_twice_and_batches_counted_once(compared: Any, backend: str, world: int) -> None:
    for rank in compared(backend, world):
        for name, seen in rank.items():
            # Under exact a window is one forward.
            passes = 3 if name == "exact" else seen["micro-steps"]
            # What exact recomputes is not recomputed once more.
            without = [2 * passes] * 2 if name == "exact" else [passes] * 2
            expected = [without, [2 * passes] * 2, [2 * passes, without[1]]]
            assert seen["calls"] == expected[: len(seen["calls"])], name
            if name in ("sync", "exact", "deferred"):
                assert seen["counted"] == [passes if name == "sync" else 3], name


@somewhere
def test_nothing_more_crosses_ranks(compared: Any, backend: str, world: int) -> None:
    for rank in compared(backend, world):
        for name, seen in rank.items():
            without, *others = seen["communication"]
            if backend_named(backend).options.get("stage") == 3:
                # It may gather again for a recomputation; what test_communication.py holds to the theory, to the byte.
                without, *others = ({**each, "all_gather": ()} for each in (without, *others))
            assert all(each == without for each in others), name


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_a_block_that_takes_another_way_ends_the_run_by_its_name(
    launch_ranks: Callable[..., list[Any]], name: str
) -> None:
    for kind, message, _ in launch_ranks(2, f"{RANKS}fickle", backend_named(name), errors=True):
        assert kind == "EngineError"
        assert message.startswith("activation_checkpointing: block '0.1' did not compute the same")


def test_a_model_without_blocks_is_refused_on_every_rank(launch_ranks: Callable[..., list[Any]]) -> None:
    for kind, message, _ in launch_ranks(2, f"{RANKS}without_blocks", backend_named("fsdp2"), errors=True):
        assert kind == "BackendError" and "activation_checkpointing: no blocks are found in Linear" in message


@pytest.mark.parametrize(("first", "then"), [("blocks", "none"), pytest.param("none", "2", marks=pytest.mark.slow)])
def test_a_checkpoint_does_not_depend_on_it(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, first: str, then: str
) -> None:
    common = ["model.width=4", "batch.micro_batch_size=24", "train.max_steps=8", "evaluation={}", "checkpoint={}"]

    def run(folder: str, *overrides: str) -> dict[int, float]:
        arguments = ("recipes/digits-resnet.yaml", [*common, *overrides], str(tmp_path / folder))
        return launch_ranks(2, "tests.conformance.run_ranks:run_recipe", *arguments)[0]["losses"]

    whole = run("whole", "backend=fsdp2")
    half = run("run", "backend=zero2", f"activation_checkpointing={first}", "train.stop_at_step=4")
    rest = run("run", "backend=fsdp2", f"activation_checkpointing={then}")
    assert max(half) == 4 and rest.keys() == whole.keys()
    for step, loss in whole.items():
        assert rest[step] == pytest.approx(loss, rel=2e-6), step
