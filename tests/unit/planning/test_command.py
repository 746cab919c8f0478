from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import RequestError
from shardkit.planning.command import Asked, _writing, understood

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
                html=tmp_path / "plan.png",
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
        "is a folder",
        "plan.png' does not end in .html or .htm",
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


def test_files_are_refused_before_the_plan(tmp_path: Path) -> None:
    (tmp_path / "old.png").write_text("")

    def refused(**files: Path) -> str:
        with pytest.raises(RequestError) as error:
            understood(Asked(recipe=RECIPE, **files))  # type: ignore[arg-type]
        return str(error.value)

    assert "old.png' is there already" in refused(plot=tmp_path / "old.png")
    assert "does not end in .yaml or .yml" in refused(write=tmp_path / "a.txt")
    assert "is the file of --html too" in refused(html=tmp_path / "a.html", write=tmp_path / "b" / ".." / "a.html")
    assert "--write '/proc/x.yaml' cannot be written" in refused(write=Path("/proc/x.yaml"))
    understood(Asked(recipe=RECIPE, write=tmp_path / "deep" / "A.YML"))
    assert [each.name for each in tmp_path.iterdir()] == ["old.png"]


def test_what_keeps_a_file_from_being_written_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(RequestError, match=r"--html '.*' cannot be written: Is a directory"),
        _writing("--html", tmp_path),
    ):
        tmp_path.write_text("")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"device_memory": "1e400GiB"}, "is no amount of memory"),
        ({"device_memory": "80"}, "80 bytes are too few; is the unit missing, as in 80GiB?"),
        ({"device_memory": "-80GiB"}, "bytes are negative"),
        ({"backends": ()}, "--backends names none"),
        ({"nodes": 3, "world_sizes": "2,8"}, "--nodes 3: 2 ranks (--world-sizes) cannot lie on so many"),
    ],
)
def test_numbers_that_are_none_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        understood(Asked(recipe=RECIPE, **asked))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_numbers_of_processes_replace_the_recipes(tmp_path: Path) -> None:
    overrides = ("launch.nproc_per_node=2", "batch.global_batch_size=7", "batch.micro_batch_size=1")
    with pytest.raises(RequestError, match="global_batch_size"):
        understood(Asked(recipe=RECIPE, overrides=overrides))
    found = understood(Asked(recipe=RECIPE, overrides=overrides, world_sizes="7"))
    assert found.loaded.recipe.launch.nproc_per_node == "auto"
