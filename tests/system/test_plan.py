"""`shardkit plan` as a person types it: the table, the JSON, the picture, the page, and what `--measure` changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.engines import registry
from shardkit.recipe.load import load
from tests.system.launches import environment, make_project
from tests.system.pages import asked, keep_screenshot, open_page

# The command itself: unlike `python -c` and `-m` it does not import from the working directory by itself.
SHARDKIT = [str(Path(sys.executable).with_name("shardkit"))]
MEMORY = 514 * 2**20 + 2**19
# Of digits-resnet on 2 ranks of a CPU, replicas do not fit, and shards do.


def shardkit(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    given = environment(OMP_NUM_THREADS="1", SHARDKIT_CACHE=str(cwd / "cache"), **more)
    return subprocess.run([*SHARDKIT, *words], cwd=cwd, env=given, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    for needed in ("sklearn", "matplotlib", "vl_convert"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("plan")
    files = ["--plot", "out/plan.png", "--html", "out/plan.html", "--write", "out/planned.yaml"]
    small = ["--device", "cpu", "--device-memory", str(MEMORY), "--world-sizes", "1,2"]
    done = shardkit("plan", "digits-resnet", *small, *files, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_the_table_says_what_fits_and_why(planned: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = planned
    assert done.stdout.isascii() and max(map(len, done.stdout.splitlines())) <= 120
    for part in (
        "1 rank of",
        "2 ranks of",
        "over",
        "free",
        "is the cheapest",
        "Exact, from the shapes",
        "* recommended",
    ):
        assert part in done.stdout, part
    assert "wrote out/plan.png" in done.stderr and "wrote out/planned.yaml" in done.stderr


def test_the_files_are_there(planned: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = planned
    assert {path.name for path in (folder / "out").iterdir()} == {"plan.png", "plan.html", "planned.yaml"}
    assert (folder / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")
    written = load(folder / "out" / "planned.yaml", options_of=registry.options_of).recipe
    original = load("digits-resnet", options_of=registry.options_of).recipe
    assert (written.model, written.train, written.batch) == (original.model, original.train, original.batch)
    assert "# 15 optimizer steps an epoch" in (folder / "out" / "planned.yaml").read_text()
    assert not (folder / "runs").exists() and not (folder / "cache").exists()


def test_the_json_has_what_is_promised(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = shardkit("plan", "digits-resnet", "--backends", "single,ddp,fsdp2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows: dict[str, Any] = {each["name"]: each for each in found["backends"]}
    assert found["recommended"] in rows and "single" in rows["single"]["name"]
    assert rows["single"]["refused"] and rows["single"]["fits"] is None
    for name in ("ddp", "fsdp2"):
        predicted = rows[name]["predicted"]
        assert rows[name]["fits"] is True and rows[name]["world_size"] == 2
        keys = ("parameters", "gradients", "optimizer", "buffers", "activations", "peak", "host")
        assert all(predicted[f"{key}_bytes"] > 0 for key in keys), predicted
        # On a CPU the host holds the process too.
        assert predicted["host_bytes"] > 100 * 2**20 > predicted["peak_bytes"]
    half = rows["fsdp2"]["predicted"]["parameters_bytes"] / rows["ddp"]["predicted"]["parameters_bytes"]
    assert 0.5 <= half < 0.52


def test_a_device_that_is_not_here_is_planned_for(tmp_path: Path) -> None:
    done = shardkit("plan", "chars-gpt", "--device", "h100-80gb", "--nodes", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {each["world_size"] for each in found["backends"]} == {16}
    assert found["device"]["name"] == "h100-80gb" and found["recommended_world_size"] == 16


def test_mistakes_are_told_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    wrong = ["--device", "h300", "--device-memory", "lots", "--world-sizes", "0", "--nodes", "0", "--write", "toy.yaml"]
    done = shardkit("plan", "toy.yaml", *wrong, "--backends", "zero7", "--html", "a.html", cwd=project)
    assert done.returncode == 2 and done.stdout == ""
    for option in ("--device 'h300'", "--device-memory", "--world-sizes", "--nodes", "--write", "--backends", "zero7"):
        assert option in done.stderr, option
    done = shardkit("plan", "chars-gpt", "--device-memory", "1MiB", "--write", "new.yaml", cwd=project)
    assert done.returncode == 2 and "Nothing fits" in done.stdout and "nothing to write" in done.stderr
    assert {path.name for path in project.iterdir()} <= {"toy.py", "toy.yaml", "__pycache__"}


def test_the_page_is_drawn_and_fetches_nothing(
    browser: Any, planned: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, _ = planned
    path = folder / "out" / "plan.html"
    open_page(browser, path, width=1280)
    assert browser.get_log("browser") == []
    assert {url.split(":")[0] for url in asked(browser)} <= {"file", "data"}
    for ranks in (1, 2):
        marks = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])]"
            ".filter(e => e.getBoundingClientRect().width > 3).length",
            f"#plot-memory-{ranks} svg .mark-rect.role-mark path",
        )
        assert marks >= 4, ranks
    text = browser.execute_script("return document.body.innerText")
    for part in (
        "is the cheapest",
        "Exact, from the shapes",
        "shardkit plan digits-resnet --device cpu",
        "recommended",
    ):
        assert part in text, part
    keep_screenshot(browser, "plan-desktop", 1280)
    open_page(browser, path, width=390, height=844)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_what_was_measured_corrects_the_next_plan(tmp_path: Path) -> None:
    """Two backends are run; the plan after it is theirs by measurement, and the measured device can be planned for."""
    pytest.importorskip("sklearn")
    small = ["plan", "digits-resnet", "--backends", "ddp,fsdp2", "--json"]
    done = shardkit(*small, "--measure", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = {each["name"]: each for each in json.loads(done.stdout)["backends"]}
    for name in ("ddp", "fsdp2"):
        measured, predicted = first[name]["measured"], first[name]["predicted"]
        assert not measured["error"] and measured["step_seconds"] > 0
        for part in ("parameters", "gradients", "optimizer", "buffers"):
            assert measured[f"{part}_bytes"] == predicted[f"{part}_bytes"], (name, part)
        assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.1)
        assert measured["host_bytes"] > measured["peak_bytes"]
    second = shardkit(*small, cwd=tmp_path)
    for each in json.loads(second.stdout)["backends"]:
        if each["name"] in ("ddp", "fsdp2"):
            assert each["predicted"]["peak_bytes"] == pytest.approx(
                first[each["name"]]["measured"]["peak_bytes"], rel=1e-6
            )
    assert "measured on this model" in json.loads(second.stdout)["correction"]
    plain = json.loads(shardkit(*small, "--no-correction", cwd=tmp_path).stdout)
    assert plain["correction"] is None and all(each["ratio"] == 1.0 for each in plain["backends"])
    there = shardkit("plan", "digits-resnet", "--backends", "ddp", "--device", "measured", cwd=tmp_path)
    assert there.returncode == 0 and "speeds as measured here" in there.stdout, there.stderr
