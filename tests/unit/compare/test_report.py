"""What a comparison says: costs, what to pick, the table of a terminal, and the files of a report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardkit.compare import report
from shardkit.compare.costs import costs
from shardkit.compare.figures import figures
from shardkit.compare.results import Comparison, read_arm, read_run
from shardkit.compare.terminal import WIDTH, table
from shardkit.compare.verdict import recommendation, verdicts
from shardkit.pages import page
from tests.comparisons import MIB, make_arm, make_run, profile_of, whole_comparison


def test_costs_are_the_worst_rank_and_the_median_run() -> None:
    runs = [make_run(profile=profile_of({"all_reduce": 1000}, mib=mib)) for mib in (100, 120, 500)]
    theory = {"communication": {"all_reduce": {"calls": None, "bytes": 990}}}
    found = costs(make_arm("a", runs, theory))
    assert found.memory.allocated == 121 * MIB
    (moved,) = found.communication
    assert (moved.kind, moved.calls, moved.bytes, moved.theory_calls, moved.theory_bytes) == (
        "all_reduce", 2, 1000, None, 990,
    )  # fmt: skip
    assert (found.first_step_seconds, found.save_seconds, found.load_seconds) == (0.5, 0.06, 0.03)


def test_without_a_profile_the_lines_of_the_run_say_what_they_can() -> None:
    found = costs(make_arm("a", [make_run()]))
    assert found.memory.host == 400 * MIB
    assert found.memory.allocated is None
    assert found.first_step_seconds == pytest.approx(0.5, rel=0.1)
    assert found.communication == ()
    assert costs(make_arm("a", [make_run(environment={"device_type": "cuda"})])).memory.allocated == 400 * MIB


@pytest.mark.parametrize("profile", [{}, {"ranks": None, "steps": 0}, {"ranks": [{"rank": 0, "communication": None}]}])
def test_a_profile_with_holes_is_read_as_far_as_it_goes(profile: dict[str, object]) -> None:
    assert costs(make_arm("a", [make_run(profile=profile)])).communication == ()


def test_the_fastest_equal_arm_is_picked_then_the_lightest_then_the_first() -> None:
    def arm(name: str, seed: int, seconds: float, mib: int):
        runs = [make_run(seed=seed + i, seconds=seconds, profile=profile_of({}, mib=mib)) for i in range(3)]
        return make_arm(name, runs)

    def picked(*arms) -> str:
        return recommendation(verdicts(Comparison(arms=list(arms), reference=arms[0].name)))

    plain, fast = arm("plain", 0, 0.1, 200), arm("fast", 10, 0.05, 400)
    light, alike = arm("light", 20, 0.1, 90), arm("alike", 30, 0.1, 200)
    assert picked(plain, fast, light).startswith("Pick fast. It is the fastest")
    assert picked(plain, light).startswith("Pick light. No difference in speed is shown to plain, and it needs least")
    assert picked(plain, alike).startswith("Pick plain. No difference in speed or memory")
    for text in (picked(plain, fast), picked(plain, light), picked(plain)):
        assert len(re.findall(r"[.](?: |$)", text)) == 2, text


def test_an_arm_that_differs_is_never_picked() -> None:
    comparison = whole_comparison()
    assert recommendation(verdicts(comparison)).startswith("Pick ddp.")


def test_the_table_fits_a_terminal_and_names_causes() -> None:
    text = table(whole_comparison())
    assert max(map(len, text.splitlines())) <= WIDTH
    for word in (
        "ddp (reference)",
        "equivalent",
        "different",
        "inconclusive",
        "failed",
        "step 1",
        "BatchNorm statistics by rank and micro-batch",
        "95 % interval",
        "Pick ",
    ):
        assert word in " ".join(text.split()), word  # fmt: skip


def test_names_as_long_as_they_come_still_fit() -> None:
    arms = [make_arm("an-arm-with-a-name-of-many-words-and-settings-" * 3 + str(i), [make_run()]) for i in range(2)]
    text = table(Comparison(arms=arms, reference=arms[0].name))
    lines = [line for line in text.splitlines() if len(line) > WIDTH]
    # A name is never cut in a sentence.
    assert all(arms[0].name in line or arms[1].name in line for line in lines)


def test_json_holds_everything_and_no_nan(tmp_path: Path) -> None:
    written = report.render(whole_comparison(), tmp_path / "new" / "folder")
    text = next(path for path in written if path.name == "report.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [arm["verdict"] for arm in found["arms"]] == [
        "equivalent",
        "equivalent",
        "different",
        "inconclusive",
        "failed",
    ]
    assert not found["equal"]
    different = found["arms"][2]
    assert different["equivalence"]["step"] == 1
    assert different["settings"][0] == {"key": "batch.micro_batch_size", "reference": "24", "arm": "12"}
    assert different["command"].startswith("python -m shardkit.launch")
    assert len(different["equivalence"]["curves"][0]["difference"]) == 30


def test_markdown_has_every_table_and_escapes_names(tmp_path: Path) -> None:
    report.render(whole_comparison(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    for heading in (
        "Relative differences",
        "Items per second",
        "Peak memory",
        "Communication",
        "The first step",
        "Settings of the recipe",
        "What the arms ran on",
        "Commands",
        "Runs that did not complete",
    ):
        assert f"## {heading}" in text, heading  # fmt: skip
    assert "| \\<b>gone\\</b>" in text.replace("</b>", "\\</b>").replace("\\\\</b>", "\\</b>")
    widths = {
        line.count("|") for line in text.split("## Settings of the recipe")[1].split("##")[0].splitlines() if line
    }
    assert len(widths - {0}) == 1


def test_figures_are_valid_for_vega_lite() -> None:
    vl_convert = pytest.importorskip("vl_convert")
    drawn = figures(verdicts(whole_comparison()))
    assert len(drawn) == 8
    for figure in drawn:
        spec = {**figure.spec, "width": 400}
        svg = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version="6.4")
        assert "<path" in svg, figure.name


def test_long_curves_are_thinned_and_keep_the_step_that_matters() -> None:
    from tests.comparisons import changed

    arms = [make_arm("a", [make_run(steps=9000)]), make_arm("b", [changed(make_run(steps=9000), 31, loss=1.4)])]
    found = verdicts(Comparison(arms=arms, reference="a"))
    assert found["b"].equivalence.step == 31
    difference = next(each for each in figures(found) if each.name == "loss-difference")
    steps = [row["step"] for row in difference.spec["data"]["values"]]
    assert len(steps) < 500
    assert 31 in steps


def test_without_vega_the_other_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "NEEDS", ("no_such_module",))
    written = report.render(whole_comparison(), tmp_path)
    assert [path.name for path in written] == ["report.md", "report.json"]


def test_a_run_folder_is_read_whatever_became_of_the_run(tmp_path: Path) -> None:
    assert read_run(tmp_path).status == "missing"
    (tmp_path / "recipe.yaml").write_text("name: digits\nbatch: {global_batch_size: 96}  # recipes/x.yaml:1:1\n")
    lines = [{"kind": "train", "step": 1, "loss": 2.0}, {"kind": "reopen"}, {"kind": "train", "step": 1, "loss": 3.0},
             {"kind": "eval", "step": 1, "loss": 1.0}, {"kind": "checkpoint", "step": 1, "seconds": 0.1}]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "train", "st')
    run = read_run(tmp_path)
    assert (run.status, [line["loss"] for line in run.train]) == ("missing", [3.0])
    assert "never came to an end" in str(run.error)
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "end", "status": "failed", "error": "rank 1: no"}\n')
    (tmp_path / "environment.json").write_text('{"command": "python -m shardkit.launch x.yaml"}')
    (tmp_path / "profile.json").write_text('{"steps": 1}')
    arm = read_arm("x", [tmp_path])
    assert (arm.runs[0].status, arm.runs[0].error) == ("failed", "rank 1: no")
    assert (arm.command, arm.recipe["batch"]["global_batch_size"]) == ("python -m shardkit.launch x.yaml", 96)
    assert (len(arm.runs[0].evals), len(arm.runs[0].checkpoints), arm.runs[0].profile) == (1, 1, {"steps": 1})
