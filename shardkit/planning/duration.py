"""How long an optimizer step takes on a device, roughly: what is computed, crosses links, is read and written.

A roofline (Williams et al. 2009) with the device's own `efficiency`: matrix products against its operations a second,
the optimizer's step and gathered copies against its memory, collectives against the slowest link they cross. A ring
moves 2 (n - 1) / n of an all-reduce's bytes past each of n ranks, (n - 1) / n of an all-gather's or reduce-scatter's
(Patarasuk and Yuan 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.communication import Traffic
from shardkit.engines.footprint import Footprint
from shardkit.planning.device import Device


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds of an optimizer step: an estimate."""

    compute: float
    communication: float
    optimizer: float
    host: float
    # Copies to and from host memory, and the step there.
    seconds: float
    # All of it, with what overlaps counted once.


def duration(
    device: Device,
    *,
    flops: int,
    precision: str,
    footprint: Footprint,
    traffic: Traffic | None,
    world_size: int,
    nodes: int,
    accumulation: int,
) -> Duration | None:
    """Seconds of a step; None where the device does not say how fast it computes in that precision.

    Args:
        device: what each rank has.
        flops: of all micro-steps of a rank.
        precision: of matrix products: fp32, bf16 or fp16.
        footprint: of the rank.
        traffic: per step; None = not known, taken as none.
        world_size: ranks.
        nodes: over which they lie.
        accumulation: micro-steps.
    """
    speed = device.flops.get(precision, 0.0) * device.efficiency
    if not speed:
        return None
    compute = flops / speed
    communication = _communication(device, traffic or {}, world_size, nodes)
    # Read parameters and gradients, write parameters, read and write state.
    stepped = footprint.masters or footprint.parameters
    touched = 2 * stepped + footprint.gradients + 2 * footprint.optimizer
    optimizer = touched / device.memory_bandwidth
    # What lies on the host goes to the device and its gradients come back, in each micro-step; the step is done there,
    # at about a tenth of an accelerator's memory bandwidth.
    host = footprint.host * (accumulation / 2 / device.host_bandwidth + 1.5 / (0.1 * device.memory_bandwidth))
    hidden = device.overlap * min(compute, communication)
    return Duration(
        compute=compute,
        communication=communication,
        optimizer=optimizer,
        host=host,
        seconds=compute + communication + optimizer + host - hidden,
    )


def _communication(device: Device, traffic: Traffic, world_size: int, nodes: int) -> float:
    if world_size == 1:
        return 0.0
    past = (world_size - 1) / world_size
    moved = sum(
        (2 if kind == "all_reduce" else 1) * past * volume.bytes for kind, volume in traffic.items() if volume.bytes
    )
    return moved / (device.link_bandwidth if nodes == 1 else min(device.link_bandwidth, device.network_bandwidth))
