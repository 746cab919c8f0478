"""Trouble on one rank is one error on all, within seconds; checkpoints that were there stay, and the run can go on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import backend_named

RANKS = "tests.conformance.robust_ranks:"
SECONDS = 5.0
BACKENDS = ["ddp", "fsdp2", "zero2"]
# Which rank, and what it says.
TROUBLES = {
    "limit": "rank 1: File too large",
    "full": "rank 1: No space left on device",
    "read-only": "rank 1: Read-only file system: ",
    "look": "rank 1: ValueError: no view of that",
    "staging": "rank 0: Input/output error",
    "write_shard": "rank 1: RuntimeError: of the writer",
    "memory": "rank 1: MemoryError: of the writer",
    "commit": "rank 0: ValueError: of the commit",
    "publish": "rank 0: Input/output error",
    "retire": "rank 0: Permission denied",
    "listing": "rank 0: Input/output error",
}
# After these the second checkpoint is there all the same.
SAVED = ("retire", "listing")


def backend_of(number: int) -> Any:
    return backend_named(BACKENDS[number % len(BACKENDS)])


@pytest.mark.parametrize("kind", TROUBLES)
def test_trouble_on_one_rank_is_one_error_on_all(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, kind: str
) -> None:
    number = list(TROUBLES).index(kind)
    # In turn: in the background, and where the run shall go on by itself.
    settings = {"asynchronous": number % 2 == 1, "on_save_error": ("raise", "raise", "warn")[number % 3]}
    ranks = launch_ranks(2, f"{RANKS}trouble", backend_of(number), str(tmp_path / "run"), kind, settings)
    first, errors, last = zip(*[rank["errors"] for rank in ranks], strict=True)
    assert set(first) == set(last) == {""}
    if settings["on_save_error"] == "warn":
        assert set(errors) == {""}
    else:
        assert len(set(errors)) == 1 and TROUBLES[kind] in errors[0]
        # What was to be done, too.
        said = f"{tmp_path}/run" in errors[0] or "checkpoint of step 2 was not saved" in errors[0]
        assert said and "Traceback" not in errors[0]
    assert max(second for rank in ranks for second in rank["seconds"]) < SECONDS
    for rank in ranks:
        assert rank["names"][1] == ["latest", "step-00000001", *(["step-00000002"] if kind in SAVED else [])]
        assert rank["digest"] == rank["before"]
        # The next save works, and retires what came before.
        assert rank["names"][2] == ["latest", "step-00000003"] and rank["verified"] == [3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for one checkpoint and a half."""
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a small disk")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_full_keeps_what_is_on_it(launch_ranks: Callable[..., list[Any]], small_disk: Path) -> None:
    settings = {"asynchronous": False, "on_save_error": "raise"}
    ranks = launch_ranks(2, f"{RANKS}trouble", backend_named("fsdp2"), str(small_disk), "nothing", settings)
    for rank in ranks:
        assert rank["errors"][0] == "" and "No space left on device" in rank["errors"][1]
        assert rank["errors"][1] == ranks[0]["errors"][1]
        assert rank["names"] == [["latest", "step-00000001"]] * 3
        assert rank["digest"] == rank["before"] and rank["verified"] == [1]


def test_ranks_that_see_different_folders_are_told_so(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ranks = launch_ranks(2, f"{RANKS}apart", backend_named("ddp"), str(tmp_path))
    for rank in ranks:
        for phase in ("save", "load"):
            why, seconds = rank[phase]
            assert why == ranks[0][phase][0] and seconds < SECONDS
            assert "all" in why and "share" in why, why
        assert [name for name in rank["names"] if "step" in name] == []


@pytest.mark.parametrize("name", BACKENDS)
def test_a_failure_of_one_rank_in_a_load_is_one_error_on_all(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    ranks = launch_ranks(2, f"{RANKS}load_trouble", backend_named(name), str(tmp_path))
    phases = [phase for phase in ranks[0] if phase not in ("nothing", "after")]
    assert len(phases) == 7
    for phase in phases:
        whys, seconds = zip(*[rank[phase] for rank in ranks], strict=True)
        assert len(set(whys)) == 1 and "rank 1: " in whys[0], f"{phase}: {whys}"
        assert max(seconds) < SECONDS
    # Nothing is left of them: the load works then, and so does the next step.
    assert all(rank["nothing"][0] == "" for rank in ranks)
    values = {value for rank in ranks for each in rank["after"] for value in each}
    assert values == {-6.0, 3.0}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_save_reads_only_and_one_before_the_first_step_counts(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    ranks = launch_ranks(2, f"{RANKS}first_step", backend_named(name), str(folder))
    for rank in ranks:
        assert rank["reading changed nothing"] and rank["position"] == 0 and rank["same"]
        assert rank["elements"] > 0
    # Saved twice: the same bytes.
    shards = sorted(path.name for path in (folder / "step-00000003").glob("shard-*"))
    assert len(shards) == 2
    for shard in shards:
        again = tmp_path / "run-again" / "step-00000003" / shard
        assert (folder / "step-00000003" / shard).read_bytes() == again.read_bytes()


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), "zero2"])
def test_training_in_the_meantime_is_training_without_saves(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    ranks = launch_ranks(2, f"{RANKS}meanwhile", backend_named(name), str(tmp_path), 25)
    for rank in ranks:
        assert len(rank["losses"]) == 25 and len(set(rank["losses"])) == 25
        assert rank["same"]
        assert rank["names"] == ["latest", "step-00000024", "step-00000025"]


@pytest.mark.parametrize(("scheme", "kind"), [("file", "LocalStorage"), ("local", "RemoteStorage")])
def test_checkpoints_at_a_url(launch_ranks: Callable[..., list[Any]], tmp_path: Path, scheme: str, kind: str) -> None:
    ranks = launch_ranks(2, f"{RANKS}elsewhere", backend_named("fsdp2"), f"{scheme}://{tmp_path}/run")
    for rank in ranks:
        assert rank["kind"] == kind
        assert rank["names"] == ["latest", "step-00000003", "step-00000004"]
        # fsspec has no rename: what has no manifest there was never finished, and is removed.
        broken = ["step-00000004"] if kind == "LocalStorage" else []
        assert rank["cleaned"] == ["latest", "step-00000003", *(["superseded-step-00000004"] if broken else [])]
        assert rank["position"] == 4 and rank["value"] == {-10.0} and rank["verified"] == 4
        assert [name for name in rank["end"] if name.startswith("step")] == ["step-00000003", "step-00000004"]
