from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit import shipped
from shardkit.errors import RequestError
from shardkit.planning.device import load_device, parse_bytes, quantity

RIGHT = {
    "memory": "80GiB",
    "flops": {"bf16": "989T"},
    "memory_bandwidth": "3TB/s",
    "link_bandwidth": "450GB/s",
    "network_bandwidth": "50GB/s",
    "host_bandwidth": "50GB/s",
}


def refusal(folder: Path, **changed: Any) -> str:
    path = folder / "mine.yaml"
    values = {**RIGHT, **changed}
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value != "left out"}))
    try:
        load_device(str(path))
    except RequestError as error:
        return str(error).replace(f"{path}: ", "")
    return ""


def test_shipped_devices_and_a_short_file_are_read(tmp_path: Path) -> None:
    for name in shipped.files("devices"):
        assert load_device(name).name == name
    assert refusal(tmp_path) == ""


def test_what_is_missing_is_told_as_missing(tmp_path: Path) -> None:
    said = refusal(tmp_path, flops="left out", link_bandwidth="left out", memory=None)
    assert said == "flops: is missing\nlink_bandwidth: is missing\nmemory: is missing"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("memory", "1e400GiB", "is more than any device has"),
        ("memory", "-1GiB", "bytes are negative"),
        ("memory", 80, "is the unit missing"),
        ("memory", "1.2.3GiB", "is no quantity"),
        ("memory", True, "is no quantity"),
        ("reserved", "80GiB", "80 GiB of 80 GiB of memory leave nothing"),
        ("reserved", "-1GiB", "is negative"),
        ("devices_per_node", 0, "0 is no number of devices"),
        ("devices_per_node", 2.9, "2.9 is no whole number"),
        ("flops", 12, "12 is no mapping"),
        ("flops", {}, "names no precision"),
        ("flops", {"fp32": 0}, "fp32: 0 is too small"),
        ("flops", {"fp64": "1T"}, "'fp64' is no known precision; expected fp32, bf16, fp16"),
        ("margin", float("nan"), "'nan' is no quantity"),
        ("link_bandwidth", "-1GB/s", "-1e+09 is negative"),
        ("host_bandwidth", 0, "0 is too small"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, key: str, value: Any, said: str) -> None:
    found = refusal(tmp_path, **{key: value})
    assert found.startswith(f"{key}: ") and said in found and "\n" not in found


def test_quantities() -> None:
    assert quantity("3.35TB/s") == 3.35e12 and quantity("1e-05") == 1e-5 and quantity("989T") == 989e12
    assert parse_bytes("1.5GiB") == 3 * 2**29 and parse_bytes(7) == 7
