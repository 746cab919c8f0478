from __future__ import annotations

import pytest

from shardkit import speed
from shardkit.world import World


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROWS", {"cpu": dict.fromkeys(speed.PRECISIONS, 64)})
    monkeypatch.setattr(speed, "BYTES", {"cpu": 2**16})
    monkeypatch.setattr(speed, "AT_LEAST", 0.002)
    found = speed.measured(World())
    assert found["kind"] == "cpu" and found["flops"].keys() == {"fp32", "bf16", "fp16"}
    assert all(value > 1e6 for value in (*found["flops"].values(), found["memory_bandwidth"], found["host_bandwidth"]))
    assert found["link_bandwidth"] is None
