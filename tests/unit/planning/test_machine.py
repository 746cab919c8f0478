from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shardkit.planning import machine as machines
from shardkit.planning.machine import host_memory, machine


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "memory.max").write_text("max\n")
    assert host_memory(tmp_path, own) == psutil.virtual_memory().total
    (tmp_path / "outer" / "memory.max").write_text("1000000\n")
    assert host_memory(tmp_path, own) == 1_000_000


def test_so_does_one_of_version_1(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("9:cpu,cpuacct:/\n4:memory:/docker/abc\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000000\n")
    assert host_memory(tmp_path, own) == 2_000_000
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_memory(tmp_path, own) == psutil.virtual_memory().total


def test_the_ranks_of_a_cpu_share_its_memory() -> None:
    found = machine("cpu")
    assert found.shared_memory == host_memory() and "shared by its ranks" in found.says


@pytest.mark.parametrize(
    "name, gib, stem",
    [
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39, "a100-40gb"),
        ("NVIDIA H200", 140, "h200-141gb"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("Tesla T4", 15, "t4-16gb"),
        ("NVIDIA RTX A4000", 16, None),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(name: str, gib: int, stem: str | None) -> None:
    found = machines._profile(name, gib * 2**30)
    assert (found and found.name) == stem
