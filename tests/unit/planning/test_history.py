from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardkit.engines import registry
from shardkit.planning import history
from shardkit.planning.device import load_device
from shardkit.planning.measure import ALONE, measurable, measured_device
from shardkit.planning.measurement import Measurement, read, step_seconds
from shardkit.recipe.load import Loaded, load
from tests.unit.planning.rows import DEVICE, GIB, plan_of, row


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loaded(*overrides: str) -> Loaded:
    return load("digits-resnet", overrides, options_of=registry.options_of)


def measured(backend: str, peak: int, *, world_size: int = 2, seconds: float | None = 2.0, **more: Any) -> Measurement:
    parts = dict.fromkeys(("parameters", "masters", "optimizer", "gradients", "buffers", "activations", "host"), 1)
    return Measurement(
        row=row(backend, 2, world_size=world_size), parts={**parts, "peak": peak}, seconds=seconds, **more
    )


def test_a_ratio_is_remembered_for_the_model_and_the_device() -> None:
    history.keep(loaded(), "cpu", [measured("ddp", 3 * GIB), measured("single", GIB, world_size=1)])
    assert history.recall(loaded(), "cpu").ratios == {"ddp": 1.5, "single": 0.5}
    assert history.recall(loaded(), "cuda").ratios == {}
    # What decides the memory of a model is another model; what does not is the same.
    assert history.recall(loaded("model.depth=14"), "cpu").ratios == {}
    assert history.recall(loaded("train.precision=bf16-mixed"), "cpu").ratios == {}
    assert history.recall(loaded("batch.micro_batch_size=12", "seed=7", "backend=fsdp2"), "cpu").ratios != {}


def test_a_later_measurement_replaces_an_earlier_one_and_the_highest_counts() -> None:
    history.keep(loaded(), "cpu", [measured("ddp", 3 * GIB)])
    history.keep(loaded(), "cpu", [measured("ddp", GIB), measured("ddp", 2 * GIB, world_size=4)])
    kept = history.recall(loaded(), "cpu")
    assert kept.ratios == {"ddp": 1.0} and "ddp x 1.000" in kept.says and "--no-correction" in kept.says


def test_recomputed_blocks_have_the_ratio_of_the_same_without() -> None:
    history.keep(loaded(), "cpu", [measured("ddp", 3 * GIB)])
    assert history.recall(loaded(), "cpu").applied == {"ddp": 1.5, row("ddp", 2, recompute=True).choice.name: 1.5}
    own = history.Kept(ratios={"ddp": 1.5, row("ddp", 2, recompute=True).choice.name: 1.1})
    assert own.applied[row("ddp", 2, recompute=True).choice.name] == 1.1


def test_a_run_that_failed_is_not_kept_and_a_broken_file_says_nothing() -> None:
    path = history.keep(loaded(), "cpu", [Measurement(row=row("ddp", 2), error="no memory")])
    assert history.recall(loaded(), "cpu").ratios == {} and history.recall(loaded(), "cpu").says == ""
    for text in ("{", "[]", '{"choices": {"a": {"ratio": 0}}}', '{"choices": 3}'):
        path.write_text(text)
        assert history.recall(loaded(), "cpu").ratios == {}


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHARDKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert history.folder() == tmp_path / "xdg" / "shardkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert history.folder() == Path.home() / ".cache" / "shardkit"


def test_the_measured_device_is_a_device_file() -> None:
    speeds = {
        "flops": {"fp32": 1e12, "bf16": 2e12},
        "memory_bandwidth": 1e11,
        "host_bandwidth": 1e10,
        "link_bandwidth": None,
    }
    device = replace(DEVICE, flops={"fp32": 1e12}, efficiency=0.5)
    plan = plan_of(row("ddp", 2), device=device, loaded=loaded())
    one = measured("ddp", GIB, world_size=1, seconds=2.0, device=speeds)
    two = measured("ddp", GIB, seconds=2.0, device={**speeds, "link_bandwidth": 5e9})
    found = measured_device(plan, [one, two])
    assert found is not None and found.link_bandwidth == 5e9 and found.flops["bf16"] == 2e12
    # A second at half of 1e12 operations a second takes two: a quarter was reached.
    assert found.efficiency == pytest.approx(0.25)
    again = load_device(str(history.keep_device(found)))
    assert again == replace(found, measured=False)
    assert measured_device(plan, [Measurement(row=row("ddp", 2), error="no")]) is None


def test_the_fullest_rank_is_read(tmp_path: Path) -> None:
    parts = ("parameters", "masters", "optimizer", "gradients", "buffers", "activations", "loading")
    ranks = [
        {f"{part}_bytes": number for part in parts} | {"peak_bytes": number, "host_bytes": 10 - number}
        for number in (3, 5, 4)
    ]
    (tmp_path / "memory.json").write_text(json.dumps({"ranks": ranks}))
    lines = [{"kind": "train", "seconds": s} for s in (9.0, 1.0, 3.0, 2.0)] + [{"kind": "end", "seconds": 99}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read(row("ddp", 2), tmp_path, tmp_path)
    assert found.parts["peak"] == 5 and found.parts["host"] == 7 and found.seconds == 2.0
    assert step_seconds(tmp_path) == 2.0


def test_what_does_not_fit_or_has_too_many_ranks_is_not_run() -> None:
    plan = plan_of(
        row("first", 99), row("second", 2), row("third", 2, world_size=4096), device=replace(DEVICE, kind="cpu")
    )
    rows, left_out = measurable(plan, plan.rows)
    assert [each.choice.backend for each in rows] == ["second"]
    assert (
        len(left_out) == 2 and "first on 2 ranks: does not fit" in left_out[0] and "4096 ranks: not run" in left_out[1]
    )


def test_the_settings_of_a_measured_run_are_settings() -> None:
    found = loaded("checkpoint.keep_best=eval/accuracy", *ALONE, "train.max_steps=3")
    assert found.recipe.train.max_steps == 3 and not found.recipe.saves and found.recipe.data.eval is None
