"""What each adapter states of dtypes is what its live engine holds, computes with and reduces in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkit.engines import registry
from shardkit.engines.meaning import NONE
from shardkit.recipe.build import make_options
from tests.conformance.conftest import backend_named
from tests.conformance.test_communication import case, meaning

PRECISIONS = ("fp32", "bf16-mixed", "bf16-true")
ONE_RANK = 1
# What the default of an engine that states nothing says.
UNKNOWN = "unknown"


def first(stated: str) -> str:
    """The dtype at the beginning of a statement."""
    return stated.replace(",", "").split()[0]


def test_stated_dtypes_are_those_of_the_live_engine(
    launch_ranks: Callable[..., list[Any]], backend: str, world: int
) -> None:
    named = backend_named(backend)
    adapter = registry.load(named.adapter)
    precisions = adapter.describe(make_options(named, adapter.Options)).precisions
    cases = [case(each, world, 1, model="batchnorm", precision=each) for each in PRECISIONS if each in precisions]
    ranks = launch_ranks(world, "tests.conformance.communication_ranks:live", named, cases)
    for each in cases:
        said, found = meaning(named, each, world), ranks[0][each.name]
        assert found["storage"] == {said.storage}, each.name
        assert found["computed"] == {said.compute}, each.name
        assert first(said.masters) in {*found["masters"], UNKNOWN}, each.name
        assert found["statistics"] == {said.norm_statistics}, each.name
        if said.reduce != UNKNOWN:
            assert found["reduced"] == (set() if world == ONE_RANK else {said.reduce}), each.name
        if said.gather not in (NONE, UNKNOWN):
            assert found["gathered"] == {said.gather}, each.name


# Every backend on two ranks, or on the one it has.
test_stated_dtypes_are_those_of_the_live_engine.where = {  # type: ignore[attr-defined]
    "quick": [(None, (2,)), ({"single"}, (1,))],
    "slow": [],
}
