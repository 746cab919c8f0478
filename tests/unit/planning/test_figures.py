from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.engines import registry
from shardkit.planning.bars import bars
from shardkit.planning.figures import figures
from shardkit.planning.html import page
from shardkit.planning.measurement import PARTS, Measurement
from shardkit.planning.plan import Plan, Wanted
from shardkit.planning.planned import Planned
from shardkit.planning.plot import plot
from shardkit.planning.reason import reason
from shardkit.recipe.load import load
from tests.unit.planning.rows import DEVICE, GIB, plan_of, row


def plan() -> Plan:
    return plan_of(
        row("first", 12, rung=1),
        row("second", 8, rung=2, options={"keep": False}),
        row("third", 2, world_size=4, rung=2),
        row("dark", None),
        loaded=load("digits-resnet", options_of=registry.options_of),
    )


def test_a_bar_is_its_parts_and_the_device_is_where_tensors_end() -> None:
    device = replace(DEVICE, margin=0.5, reserved=GIB)
    whole = replace(plan(), device=device)
    found = bars(whole, whole.rows, {})
    assert [each.world_size for each in found] == [2, 4]
    first = next(bar for bar in found[0].bars if bar.name == "first")
    assert sum(first.parts.values()) == 12 * GIB and first.needs == 18 * GIB
    assert found[0].limit == 9 * GIB and found[0].unit_name == "GiB" and "dashed" in found[0].caption
    assert {bar.name for bar in found[0].bars} == {"first", "* second, keep=false"}


def test_a_device_that_is_far_away_is_not_drawn() -> None:
    (_, far) = bars(replace(plan(), device=DEVICE), plan().rows, {})
    assert far.limit is None and "far to the right" in far.caption
    (drawn,) = figures([far])
    assert drawn.name == "memory-4" and len(drawn.spec["layer"]) == 2


def test_what_was_measured_is_drawn() -> None:
    first = plan().rows[0]
    parts = {**dict.fromkeys(PARTS, GIB), "peak": 5 * GIB}
    measured = {(first.choice.name, first.choice.world_size): Measurement(row=first, parts=parts)}
    found = bars(plan(), plan().rows, measured)
    assert found[0].bars[0].measured == 5 * GIB and "Circles" in found[0].caption
    assert len(figures(found)[0].spec["layer"]) == 4


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, drawn in enumerate((bars(plan(), plan().rows, {}), [])):
        plot(drawn, tmp_path / f"{number}.png", "Plan")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_holds_all_and_escapes_it() -> None:
    pytest.importorskip("vl_convert")
    found = Planned(
        plan=plan(),
        reason=reason(plan()),
        wanted=Wanted(device=DEVICE, world_sizes=(2, 4)),
        machine="",
        correction="Corrected <b>a lot</b>.",
        base=0,
    )
    text = page(found, "shardkit plan x.yaml 'a=<b>'")
    for word in ("Plan of digits-resnet on made", "second (keep=false) on 2 ranks is the cheapest", "dark (2 ranks)"):
        assert word in text, word
    assert "<b>" not in text.split("<script")[0] and "a=&lt;b&gt;" in text and "&lt;b&gt;a lot" in text
    assert text.count('class="plot"') == 2 and 'class="word over"' in text and 'class="word fits"' in text
