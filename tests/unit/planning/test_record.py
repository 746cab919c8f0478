from __future__ import annotations

import json
from dataclasses import replace

from shardkit.planning.measurement import Measurement
from shardkit.planning.reason import reason
from shardkit.planning.record import record
from tests.unit.planning.rows import DEVICE, GIB, plan_of, row

KEYS = {"parameters", "gradients", "optimizer", "buffers", "activations", "peak", "host", "masters", "communication"}


def test_the_record_has_what_is_promised() -> None:
    plan = plan_of(row("first", 12, rung=1, largest=2), row("second", 8, rung=2), row("third", None, rung=3))
    found = json.loads(json.dumps(record(plan, reason(plan), base=0)))
    assert found["recommended"] == "second" and found["runner_up"] is None
    by_name = {each["name"]: each for each in found["backends"]}
    assert by_name["first"]["fits"] is False and by_name["second"]["fits"] is True and by_name["third"]["fits"] is None
    for each in by_name.values():
        assert {f"{key}_bytes" for key in KEYS} <= each["predicted"].keys() and each["world_size"] == 2
    assert by_name["first"]["predicted"]["activations_bytes"] == 6 * GIB
    assert by_name["first"]["predicted"]["host_bytes"] == 0
    assert by_name["first"]["predicted"]["peak_bytes"] == 12 * GIB == by_name["first"]["needs_bytes"]
    assert by_name["third"]["predicted"]["peak_bytes"] is None and by_name["third"]["unknown"] == "nothing is known"
    assert "measured" not in by_name["first"] and found["reason"].startswith("second on 2 ranks is the cheapest")


def test_on_a_cpu_the_host_holds_the_process_and_the_peak() -> None:
    cpu = replace(DEVICE, kind="cpu")
    plan = plan_of(row("first", 2, device=cpu), device=cpu)
    (found,) = record(plan, reason(plan), base=GIB)["backends"]
    assert found["predicted"]["host_bytes"] == 3 * GIB


def test_what_was_measured_has_the_same_keys() -> None:
    first = row("first", 2)
    parts = {"parameters": 1, "masters": 0, "optimizer": 2, "gradients": 3, "buffers": 0, "activations": 4, "peak": GIB}
    plan = plan_of(first)
    measured = {("first", 2): Measurement(row=first, parts={**parts, "host": 5})}
    (found,) = record(plan, reason(plan), base=0, measured=measured)["backends"]
    assert found["measured"]["peak_bytes"] == GIB and found["measured"]["ratio"] == 0.5
    wanted = {"parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes", "activations_bytes"}
    assert wanted | {"peak_bytes", "host_bytes"} <= found["measured"].keys()
