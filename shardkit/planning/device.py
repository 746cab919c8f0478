"""What a device can do: files in devices/, to be edited or copied, and what was measured on the spot."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from shardkit import shipped
from shardkit.errors import RequestError
from shardkit.planning.amount import size

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
PRECISIONS = ("fp32", "bf16", "fp16")
# Of matrix products.
BANDWIDTHS = ("memory_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth")
REQUIRED = ("memory", "flops", *BANDWIDTHS)
# Of a device's file.
UNIT_MISSING = 2**20
# No device has less memory: such a number has lost its unit.


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a rank, and what it reaches others by. Bandwidths are bytes a second, in one direction."""

    name: str
    kind: str = "cuda"
    # cuda or cpu.
    memory: int = 0
    # Bytes.
    reserved: int = 0
    # Bytes of it that no tensor gets: the CUDA context, NCCL's buffers, libraries' workspaces.
    margin: float = 0.1
    # Part of a predicted peak that is kept free beside it: for fragmentation, and for what the plan does not see.
    flops: Mapping[str, float] = field(default_factory=dict)
    # Precision of matrix products -> floating-point operations a second at best.
    efficiency: float = 0.4
    # Part of it that a model reaches.
    memory_bandwidth: float = 0.0
    # Between the device and its memory.
    link_bandwidth: float = 0.0
    # Between devices of a node.
    network_bandwidth: float = 0.0
    # Between a device and those of other nodes.
    host_bandwidth: float = 0.0
    # Between the device and host memory.
    devices_per_node: int = 8
    overlap: float = 0.5
    # Part of the communication that goes on while the device computes.
    measured: bool = False

    def check(self) -> Iterator[tuple[str, str]]:
        if self.kind not in ("cuda", "cpu"):
            yield "kind", f"{self.kind!r} is no kind of device; expected cuda or cpu"
        if not 0 <= self.margin < 1:
            yield "margin", f"{self.margin} is no part of a peak; expected 0 to below 1"
        for name in ("efficiency", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                yield name, f"{getattr(self, name)} is no part of the whole; expected 0 to 1"
        for name in BANDWIDTHS:
            if not getattr(self, name) > 0:
                yield name, f"{getattr(self, name):g} {_too_small(getattr(self, name))}; expected more than 0"
        for precision, number in self.flops.items():
            if precision not in PRECISIONS:
                yield "flops", f"{precision!r} is no known precision; expected {', '.join(PRECISIONS)}"
            if not number > 0:
                yield "flops", f"{precision}: {number:g} {_too_small(number)}; expected more than 0"
        if not self.flops:
            yield "flops", f"names no precision; expected some of {', '.join(PRECISIONS)}"
        if self.memory < UNIT_MISSING:
            yield "memory", why_little(self.memory)
        if self.reserved < 0:
            yield "reserved", f"{self.reserved} is negative; expected 0 or more"
        elif 0 < self.memory <= self.reserved:
            yield "reserved", f"{size(self.reserved)} of {size(self.memory)} of memory leave nothing; expected less"
        if self.devices_per_node < 1:
            yield "devices_per_node", f"{self.devices_per_node} is no number of devices; expected 1 or more"

    def with_memory(self, memory: int) -> Device:
        """The same with more or less memory, in bytes."""
        return replace(self, memory=memory)


def load_device(name: str) -> Device:
    """The device of a file in devices/, or of a path to such a file.

    Raises:
        RequestError: there is no such file, or it is wrong; all that is wrong.
    """
    known = shipped.files("devices")
    path = known.get(name) or Path(name)
    if not path.is_file():
        raise RequestError(
            f"--device {name!r}: there is no such device; expected one of {', '.join(known)}, or the path of a YAML "
            "file like those in devices/"
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RequestError(f"{path}: is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{path}: holds no device; expected keys like those in devices/")
    return _device(path, values)


def _device(path: Path, values: dict[str, Any]) -> Device:
    known = {each.name for each in fields(Device)} - {"measured"}
    problems = [
        f"{key} is no property of a device; expected {', '.join(sorted(known))}" for key in values.keys() - known
    ]
    problems += [f"{key}: is missing" for key in REQUIRED if values.get(key) is None]
    read: dict[str, Any] = {"name": path.stem}
    for key in values.keys() & known:
        if values[key] is None:
            continue
        try:
            read[key] = _read(key, values[key])
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if not problems:
        device = Device(**read)
        problems = [f"{key}: {message}" for key, message in device.check()]
        if not problems:
            return device
    raise RequestError("\n".join(f"{path}: {problem}" for problem in sorted(problems)))


def _read(key: str, value: Any) -> Any:
    if key in ("name", "kind"):
        return str(value)
    if key == "flops":
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is no mapping; expected operations a second by precision: {{bf16: 989T}}")
        return {str(precision): quantity(str(number)) for precision, number in value.items()}
    if key in ("memory", "reserved"):
        return parse_bytes(value)
    if key == "devices_per_node":
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{value!r} is no whole number")
        return value
    return quantity(str(value))


def _too_small(number: float) -> str:
    return "is negative" if number < 0 else "is too small"


def why_little(memory: int) -> str:
    """Why so few bytes are no memory of a device."""
    if memory < 1:
        return f"{memory} bytes are {'negative' if memory else 'none'}; expected more than 0"
    return f"{memory} bytes are too few; is the unit missing, as in 80GiB?"


def quantity(text: str) -> float:
    """A number with a unit: 3.35TB/s, 989T, 900GB/s, 1e12.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(
        r"\s*(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([kKMGT]i?)?(B|FLOP|FLOPS)?(/s)?\s*", text, re.ASCII
    )
    if not found:
        raise ValueError(f"{text!r} is no quantity; expected a number with a unit, as 989T, 900GB/s or 80GiB")
    number = float(found[1]) * _UNITS[(found[2] or "").lower()]
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is more than any device has")
    return number


def parse_bytes(value: Any) -> int:
    """Bytes of 80GiB, 24GB, 512MiB or a number.

    Raises:
        ValueError: it is none.
    """
    return int(quantity(str(value)))
