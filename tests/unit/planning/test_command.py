from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.errors import RequestError
from shardkit.planning.command import Asked, understood

RECIPE = "digits-resnet"


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "nothing"))
    there = tmp_path / "there.yaml"
    there.write_text("")
    with pytest.raises(RequestError) as refused:
        understood(
            Asked(
                recipe=RECIPE,
                overrides=["optimzer.lr=1"],
                backends=["ddp", "zero7"],
                device="h300",
                device_memory="80 quarts",
                world_sizes="1,two",
                nodes=0,
                plot=tmp_path,
                write=there,
            )
        )
    said = str(refused.value)
    for part in (
        "did you mean 'optimizer'?",
        "--backends: backend: no backend is named 'zero7'",
        "--device 'h300': there is no such device",
        "--device-memory '80 quarts' is no amount of memory",
        "--world-sizes '1,two' is no list",
        "--nodes 0",
        "--plot",
        "is there already",
    ):
        assert part in said, part
    assert refused.value.exit_code == 2
    with pytest.raises(RequestError, match="no device has been measured here yet"):
        understood(Asked(recipe=RECIPE, device="measured"))


def test_right_values_are_read() -> None:
    found = understood(Asked(recipe=RECIPE, device="h100-80gb", device_memory="40GiB", world_sizes="8, 2,8"))
    assert found.device is not None and found.device.name == "h100-80gb"
    assert (found.memory, found.world_sizes) == (40 * 2**30, (2, 8))
