from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.errors import RequestError
from shardkit.planning.command import Asked, understood
from shardkit.planning.machine import host_memory
from shardkit.planning.plan import Wanted
from shardkit.planning.planned import Planned, measured, planned
from shardkit.recipe.load import Loaded
from tests.unit.planning.rows import DEVICE, GIB


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path))


def two(loaded: Loaded, kind: str) -> int:
    return 2


def plan(**asked: object) -> tuple[Planned, Asked]:
    pytest.importorskip("sklearn")
    wanted = replace(Asked(recipe="digits-resnet", backends=("ddp",)), **asked)  # type: ignore[arg-type]
    return planned(wanted, understood(wanted), two), wanted


def test_the_ranks_of_a_node_share_a_cpu() -> None:
    found, _ = plan(world_sizes="1,2,4")
    memory = {row.choice.world_size: row.memory for row in found.plan.rows}
    assert memory == {1: host_memory(), 2: host_memory() // 2, 4: host_memory() // 4}
    found, _ = plan(world_sizes="4", nodes=2)
    assert {row.memory for row in found.plan.rows} == {host_memory() // 2}


def test_what_a_launch_would_start_is_planned() -> None:
    assert {row.choice.world_size for row in plan()[0].plan.rows} == {2}
    assert {row.choice.world_size for row in plan(nodes=3)[0].plan.rows} == {6}
    assert {row.choice.world_size for row in plan(device="a100-80gb", nodes=2)[0].plan.rows} == {16}
    alone = plan(device="a100-80gb", overrides=["backend=single"], backends=("single",))[0]
    assert {row.choice.world_size for row in alone.plan.rows} == {1}


def test_ranks_that_nodes_have_unequally_many_of_are_told() -> None:
    found, _ = plan(world_sizes="2,3", nodes=2)
    notes = {row.choice.world_size: row.note for row in found.plan.rows}
    assert "not as many on each of 2 nodes" in notes[3] and notes[2] == ""
    assert any(row is found.plan.recommended for row in found.plan.rows)


def test_memory_that_is_given_is_that_of_a_rank() -> None:
    found, _ = plan(device_memory="3GiB", world_sizes="1,4")
    assert {row.memory for row in found.plan.rows} == {3 * GIB}


def test_another_machine_is_not_measured() -> None:
    found, asked = plan(device="a100-80gb")
    with pytest.raises(RequestError, match="--measure runs on this machine"):
        measured(found, asked)


def test_nodes_are_as_few_as_hold_the_ranks() -> None:
    wanted = Wanted(device=DEVICE, world_sizes=(8, 9))
    assert [wanted.over_nodes(size) for size in (1, 8, 9)] == [1, 1, 2]
    assert replace(wanted, nodes=3).over_nodes(8) == 3
    shared = replace(wanted, shared_memory=12 * GIB)
    assert shared.device_of(8).memory == 12 * GIB // 8 and shared.device_of(9).memory == 12 * GIB // 5
