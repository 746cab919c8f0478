"""A plan as JSON: bytes a rank, null where a number is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shardkit.planning.measurement import Measurement
from shardkit.planning.plan import Plan, Row
from shardkit.planning.reason import Reason, moved_bytes

STATES = ("parameters", "masters", "optimizer", "gradients", "buffers")


def record(
    plan: Plan,
    reason: Reason,
    *,
    base: int,
    measured: Mapping[tuple[str, int], Measurement] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The whole plan.

    Args:
        plan: the plan.
        reason: why it recommends what it does.
        base: resident bytes of a process before it has a model: on a CPU these and the peak are the host's memory.
        measured: (name of a choice, number of ranks) -> what a run of it needed.
        more: further facts, as what was asked.
    """
    first, second = plan.recommended, plan.runner_up
    return {
        "backends": [_row(plan, row, base, (measured or {}).get(key_of(row))) for row in plan.rows],
        "recommended": first and first.choice.name,
        "recommended_world_size": first and first.choice.world_size,
        "runner_up": second and second.choice.name,
        "runner_up_world_size": second and second.choice.world_size,
        "reason": str(reason),
        "fits_with": list(reason.nearest.overrides) if reason.nearest else None,
        "device": {**asdict(plan.device), "flops": dict(plan.device.flops)},
        "model": {"parameters": plan.parameters, "built_on": plan.built_on},
        **more,
    }


def key_of(row: Row) -> tuple[str, int]:
    """What tells a plan's rows apart."""
    return row.choice.name, row.choice.world_size


def _row(plan: Plan, row: Row, base: int, measured: Measurement | None) -> dict[str, Any]:
    choice = row.choice
    found: dict[str, Any] = {
        "name": choice.name,
        "world_size": choice.world_size,
        "fits": row.fits,
        "predicted": _predicted(plan, row, base),
        "backend": choice.backend,
        "options": dict(choice.options),
        "activation_checkpointing": choice.activation_checkpointing,
        "memory_bytes": row.memory or None,
        "needs_bytes": row.needs,
        "largest_micro_batch_size": row.largest_micro_batch_size,
        "micro_batch_size": row.micro_batch_size,
        "accumulation": row.accumulation,
        "communication_bytes_per_step": moved_bytes(row),
        "step_seconds": row.duration and row.duration.seconds,
        "settings": dict(row.footprint.settings) if row.footprint else {},
        "ratio": row.ratio,
        "peak_at": row.footprint.when if row.peak is not None and row.footprint else None,
        "refused": row.refused,
        "unknown": row.unknown,
        "note": row.note,
    }
    if measured is not None:
        found["measured"] = measured.to_json()
    return found


def _predicted(plan: Plan, row: Row, base: int) -> dict[str, int | None]:
    """Of the fullest rank; what is in memory at the peak for activations and communication, else between steps."""
    found = row.footprint
    if found is None:
        keys = (*STATES, "activations", "communication", "peak", "loading", "host", "host_loading")
        return {f"{key}_bytes": None for key in keys}
    known = row.peak is not None
    host: int | None = found.host
    if plan.device.kind == "cpu":
        host = base + (row.peak or 0) if known else None
    return {
        **{f"{part}_bytes": getattr(found, part) for part in STATES},
        "activations_bytes": found.at_peak.get("activations", 0) if known else None,
        "communication_bytes": found.at_peak.get("communication", 0) if known else None,
        "peak_bytes": row.peak,
        "loading_bytes": found.loading,
        "host_bytes": host,
        "host_loading_bytes": found.host_loading,
    }
