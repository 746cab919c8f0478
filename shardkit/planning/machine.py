"""The devices of this machine, as a plan reckons with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from shardkit import shipped
from shardkit.planning.amount import size
from shardkit.planning.device import Device, load_device

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 2**60
# What cgroups say for no limit is about 2^63; no machine has so much.


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine's ranks have."""

    device: Device
    shared_memory: int | None
    # Bytes that its ranks share; None = each device has its own.
    says: str
    # What it is, and where the numbers are from.


def machine(kind: str) -> Machine:
    """This machine's devices of a kind, "cuda" or "cpu"."""
    return _cuda() if kind == "cuda" else _cpu()


def host_memory(cgroup: Path = CGROUP, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of memory that this process and its children may use: the machine's, or its cgroup's limit."""
    return min([psutil.virtual_memory().total, *_limits(cgroup, own)])


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    return psutil.Process().memory_info().rss


def _cpu() -> Machine:
    memory = host_memory()
    device = replace(load_device("cpu"), name="this machine's CPU", memory=memory)
    return Machine(
        device=device,
        shared_memory=memory,
        says=f"this machine's CPU, {size(memory)} shared by its ranks; speeds as in devices/cpu.yaml",
    )


def _cuda() -> Machine:
    import torch

    found = torch.cuda.get_device_properties(0)
    profile = _profile(found.name, found.total_memory)
    count = torch.cuda.device_count()
    speeds = "no profile in devices/ has its speeds, so step times are not known"
    if profile is not None:
        speeds = f"speeds as in devices/{profile.name}.yaml"
    device = replace(
        profile or Device(name=found.name, reserved=2**30),
        name=found.name,
        memory=found.total_memory,
        devices_per_node=count,
    )
    return Machine(
        device=device,
        shared_memory=None,
        says=f"{count} x {found.name} at hand, {size(found.total_memory)} each; {speeds}",
    )


def _profile(name: str, memory: int) -> Device | None:
    """The shipped profile of a device by what its driver calls it: h100-80gb is an "NVIDIA H100 80GB HBM3"."""
    words = name.lower().replace("-", " ").split()
    models = {stem: stem.split("-")[0] if stem[0] != "r" else stem.split("-")[1] for stem in shipped.files("devices")}
    close = [load_device(stem) for stem, model in models.items() if model in words]
    return min(close, key=lambda device: abs(device.memory - memory), default=None)


def _limits(cgroup: Path, own: Path) -> Iterator[int]:
    """Limits of the cgroups that this process is in, of version 2 or 1."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (cgroup / "memory", "memory.limit_in_bytes") if controllers else (cgroup, "memory.max")
        within = Path(path.lstrip("/"))
        # In a container the path is often that of the host, and the root is the container's own.
        for folder in {root, *(root / each for each in (within, *within.parents))}:
            try:
                text = (folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < UNLIMITED:
                yield int(text)
