"""A plan with all that is shown of it: why, on what, corrected by what, and what was measured beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardkit import shipped
from shardkit.engines import registry
from shardkit.errors import RecipeError, RequestError
from shardkit.planning import history
from shardkit.planning.device import Device, load_device
from shardkit.planning.errors_table import errors_table
from shardkit.planning.machine import Machine, machine, resident_bytes
from shardkit.planning.measure import measurable, measure, measured_device
from shardkit.planning.measurement import Measurement
from shardkit.planning.plan import Plan, Row, Wanted, plan
from shardkit.planning.reason import Reason, reason
from shardkit.planning.record import key_of, record
from shardkit.planning.table import shown, table
from shardkit.recipe.build import check_targets
from shardkit.recipe.load import Loaded
from shardkit.world import resolve_device

if TYPE_CHECKING:
    from shardkit.planning.command import Asked, Processes, Request


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What `shardkit plan` shows."""

    plan: Plan
    reason: Reason
    wanted: Wanted
    machine: str
    # Where the device's numbers are from; empty = a file that says it.
    correction: str
    base: int
    # Resident bytes of this process before the plan.
    every: bool = False
    # Show all choices.
    measured: Mapping[tuple[str, int], Measurement] = field(default_factory=dict)

    def text(self) -> str:
        """For a terminal."""
        text = table(self.plan, self.reason, every=self.every, machine=self.machine, correction=self.correction)
        return "\n".join([text, *(["", errors_table(list(self.measured.values()))] if self.measured else [])])

    def record(self) -> dict[str, Any]:
        """For `--json`."""
        more = {"correction": self.correction or None}
        return record(self.plan, self.reason, base=self.base, measured=self.measured, **more)


def planned(asked: Asked, request: Request, processes: Processes) -> Planned:
    """Plan what was asked.

    Raises:
        RequestError: the recipe cannot be built.
    """
    loaded = request.loaded
    problems = check_targets(loaded)
    if problems:
        raise RecipeError(problems)
    base = resident_bytes()
    kind = request.device.kind if request.device else resolve_device(loaded.recipe.launch.device, 0).type
    here = machine(kind) if request.device is None or request.device.measured else None
    device = request.device or (here and here.device)
    assert device is not None
    sizes = request.world_sizes or (_started(loaded, device, here, processes) * (asked.nodes or 1),)
    if here is not None and here.shared_memory is not None:
        # All ranks are on this machine, however many.
        device = replace(device, devices_per_node=max(sizes))
    shared = here.shared_memory if here else None
    if request.memory is not None:
        device, shared = device.with_memory(request.memory), None
    kept = history.recall(loaded, kind) if asked.correct else history.Kept(ratios={})
    wanted = Wanted(
        device=device,
        world_sizes=sizes,
        nodes=asked.nodes,
        backends=tuple(dict.fromkeys(asked.backends or ())),
        ratios=kept.applied,
        shared_memory=shared,
    )
    found = _noted(plan(loaded, wanted), asked.nodes)
    corrected = any(row.ratio != 1.0 for row in found.rows)
    return Planned(
        plan=found,
        reason=reason(found, _others(kind)),
        wanted=wanted,
        machine=_says(here, request),
        correction=kept.says if corrected else "",
        base=base,
        every=asked.every,
    )


def measured(found: Planned, asked: Asked) -> Planned:
    """The same, with what runs on this machine needed; ratios and the device are kept for later plans.

    Raises:
        RequestError: the plan is for other devices than this machine has.
    """
    kind = resolve_device(found.plan.loaded.recipe.launch.device, 0).type
    if found.plan.device.kind != kind:
        raise RequestError(f"--measure runs on this machine, which has {kind} devices; leave --device out")
    wanted = [row for row in shown(found.plan, every=asked.every) if asked.every or _bare(found.plan, row)]
    rows, left_out = measurable(found.plan, wanted)
    for line in left_out:
        print(f"shardkit: {line}", file=sys.stderr)
    results = list(measure(found.plan, rows, asked.recipe, asked.overrides))
    kept = history.keep(found.plan.loaded, kind, results)
    device = measured_device(found.plan, results)
    written = [kept] if device is None else [kept, history.keep_device(device)]
    print(f"shardkit: kept for later plans in {', '.join(map(str, written))}", file=sys.stderr)
    return replace(found, measured={key_of(each.row): each for each in results})


def _noted(plan: Plan, nodes: int | None) -> Plan:
    """The same, with a note on numbers of ranks that are not shared out evenly."""
    uneven = [row for row in plan.rows if row.choice.world_size % (nodes or 1)]
    note = f"not as many on each of {nodes} nodes, so that a launch starts another number of ranks"
    changed = {id(row): replace(row, note="; ".join(filter(None, [row.note, note]))) for row in uneven}

    def new(row: Row) -> Row:
        return changed.get(id(row), row)

    return replace(
        plan,
        rows=tuple(map(new, plan.rows)),
        recommended=plan.recommended and new(plan.recommended),
        runner_up=plan.runner_up and new(plan.runner_up),
    )


def _says(here: Machine | None, request: Request) -> str:
    if here is None or request.memory is not None:
        return ""
    return f"{here.says.partition(';')[0]}; speeds as measured here" if request.device else here.says


def _bare(plan: Plan, row: Row) -> bool:
    """Without recomputed blocks, or what is recommended."""
    return row.choice.activation_checkpointing is None or row is plan.recommended


def _started(loaded: Loaded, device: Device, here: Machine | None, processes: Processes) -> int:
    """Processes of a node: those of a launch here, or one a device of a machine that has such ones."""
    asked = loaded.recipe.launch.nproc_per_node
    if here is not None or isinstance(asked, int) or device.kind == "cpu":
        return processes(loaded, device.kind)
    # On a node of another machine.
    registration = registry.BUILT_IN.get(loaded.recipe.backend.adapter)
    return 1 if registration is not None and registration.one_process else device.devices_per_node


def _others(kind: str) -> list[Device]:
    """The devices of a kind that come with shardkit."""
    devices = [load_device(name) for name in shipped.files("devices")]
    return [device for device in devices if device.kind == kind == "cuda"]
