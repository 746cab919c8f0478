from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.engines.registry import options_of
from shardkit.errors import RecipeError
from shardkit.recipe.load import load
from tests.unit.recipe.conftest import SOUND, Load, Refuse

ROOT = Path(__file__).parents[3]

SEVEN_MISTAKES = """\
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 2}
data:
  train: {split: train}
  num_workers: "2"
loss: {_target_: shardkit.losses.CrossEntropy}
optimizer: {_target_: torch.optim.SGD, lr: ${train.max_stepz}, momentum: 123e456}
batch:
  global_batch_size: 128
  micro_batch_sise: 16
train:
  max_steps: 1e3
  precision: bf61
backend: zro2
"""


def test_seven_mistakes_are_seven_problems_in_the_order_of_their_places(refuse: Refuse) -> None:
    problems = refuse(text=SEVEN_MISTAKES)
    assert [(problem.place, problem.key) for problem in problems] == [
        ("recipe.yaml:3:3", "data.train"),
        ("recipe.yaml:4:3", "data.num_workers"),
        ("recipe.yaml:6:40", "optimizer.lr"),
        ("recipe.yaml:6:64", "optimizer.momentum"),
        ("recipe.yaml:9:3", "batch.micro_batch_sise"),
        ("recipe.yaml:12:3", "train.precision"),
        ("recipe.yaml:13:1", "backend"),
    ]
    hints = [
        "_target_",
        "without quotes",
        "'train.max_steps'",
        "too large",
        "'micro_batch_size'",
        "'bf16-mixed'",
    ]
    for problem, hint in zip(problems, [*hints, "'zero2'"], strict=True):
        assert hint in problem.message, str(problem)


def test_a_wrong_recipe_is_answered_at_once_and_without_torch(tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text(SEVEN_MISTAKES)
    code = f"""
import sys
from shardkit.engines.registry import options_of
from shardkit.errors import RecipeError
from shardkit.recipe.load import load
try:
    load({str(recipe)!r}, options_of=options_of)
except RecipeError as error:
    print(len(error.problems), "torch" in sys.modules)
"""
    started = time.monotonic()
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["7", "False"]
    assert time.monotonic() - started < 1.5


def test_values_of_untyped_arguments_mean_what_they_look_like(load_text: Load) -> None:
    extra = "scheduler: {_target_: a.B, a: 1e-4, b: 1E5, c: .5, d: 1_000, on: off, e: 12:30:45, f: 0123, g: ~}\n"
    scheduler = load_text(extra=extra).recipe.scheduler
    assert scheduler == {
        "_target_": "a.B",
        "a": 1e-4,
        "b": 1e5,
        "c": 0.5,
        "d": 1000,
        "on": "off",
        "e": "12:30:45",
        "f": "0123",
        "g": None,
    }


@pytest.mark.parametrize("text", ["1e-4", "0123", "true", "123e456", "1_000", "2020-01-01", "off"])
def test_text_without_quotes_stays_as_written_where_text_is_asked_for(load_text: Load, text: str) -> None:
    assert load_text(extra=f"name: {text}\n").recipe.name == text


@pytest.mark.parametrize(("text", "value"), [("1000", 1000), ("1e3", 1000), ("1_000", 1000), ("2.0", 2)])
def test_a_whole_number_may_be_written_as_any_number(load_text: Load, text: str, value: int) -> None:
    steps = load_text(f"train.max_steps={text}").recipe.train.max_steps
    assert steps == value
    assert type(steps) is int


@pytest.mark.parametrize("text", ["2.5", "true", "0123", "'7'", "1e400", ".inf", "ten", "[1]", "{a: 1}"])
def test_what_is_no_whole_number_is_refused(refuse: Refuse, text: str) -> None:
    (problem,) = refuse(extra=f"seed: {text}\n")
    assert (problem.place, problem.key) == ("recipe.yaml:14:1", "seed")


def test_numbers_in_quotes_and_with_leading_zeros_get_a_hint(refuse: Refuse) -> None:
    assert "write 7 without quotes" in refuse(extra="seed: '7'\n")[0].message
    assert "write 123" in refuse(extra="seed: 0123\n")[0].message


def test_a_number_field_takes_a_whole_number(load_text: Load) -> None:
    assert load_text("train.max_grad_norm=1").recipe.train.max_grad_norm == 1.0


@pytest.mark.parametrize("text", ["yes", "on", "1", "'true'"])
def test_only_true_and_false_are_booleans(refuse: Refuse, text: str) -> None:
    (problem,) = refuse(extra=f"metrics: {{tensorboard: {text}}}\n")
    assert "expected true or false" in problem.message or "not true or false" in problem.message


def test_null_is_refused_where_it_means_nothing_and_kept_where_it_does(refuse: Refuse, load_text: Load) -> None:
    assert "null" in refuse(extra="name: null\n")[0].message
    assert load_text(extra="run_dir:\n").recipe.run_dir is None


def test_an_empty_section_means_its_defaults_or_says_what_it_needs(load_text: Load, refuse: Refuse) -> None:
    assert load_text(extra="metrics:\nevaluation:\nparameter_groups:\n").recipe.metrics.every == 1
    (problem,) = refuse(text=SOUND.replace("  global_batch_size: 8\n  micro_batch_size: 2\n", ""))
    assert str(problem).startswith("recipe.yaml:8:1: batch: is empty; expected a section with global_batch_size")
    (problem,) = refuse(text=SOUND.replace("  max_steps: 100\n", ""))
    assert (problem.place, problem.key) == ("recipe.yaml:11:1", "train")
    assert "defaults" in refuse(extra="metrics: null\n")[0].message


def test_a_missing_section_is_one_problem(refuse: Refuse) -> None:
    (problem,) = refuse(text=SOUND.replace("backend: ddp\n", ""))
    assert str(problem).startswith("recipe.yaml:1:1: backend: is missing; expected a name from backends/")


@pytest.mark.parametrize(
    ("extra", "hint"),
    [
        ("sed: 1\n", "did you mean 'seed'"),
        ("max_epochs: 1\n", "did you mean train.max_epochs"),
        ("train.max_epochs: 1\n", "inside the section 'train'"),
        ("metrics: {evry: 2}\n", "did you mean 'every'"),
        ("parameter_groups: [{match: x, option: {}}]\n", "did you mean 'options'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(refuse: Refuse, extra: str, hint: str) -> None:
    (problem,) = refuse(extra=extra)
    assert hint in problem.message
    assert problem.place.startswith("recipe.yaml:14:")


def test_a_mistyped_required_key_is_one_problem(refuse: Refuse) -> None:
    (problem,) = refuse(text=SOUND.replace("optimizer:", "optimzer:"))
    assert problem.message == "unknown key; did you mean 'optimizer'?"
    (problem,) = refuse(text=SOUND.replace("max_steps", "max_step"))
    assert problem.message == "unknown key; did you mean 'max_steps'?"


def test_a_rule_is_asked_although_other_sections_have_problems(refuse: Refuse) -> None:
    problems = refuse("batch.global_batch_size=7", "launch.nproc_per_node=2", "train.precision=x", "seed=y")
    assert [problem.key for problem in problems] == ["batch.global_batch_size", "seed", "train.precision"]


def test_a_rule_does_not_look_at_a_value_with_a_problem(refuse: Refuse) -> None:
    problems = refuse("batch.global_batch_size=7", "launch.nproc_per_node=two")
    assert [problem.key for problem in problems] == ["launch.nproc_per_node"]


def test_rules_of_sections_have_their_places(refuse: Refuse) -> None:
    (problem,) = refuse(extra="metrics: {every: 0}\n")
    assert str(problem).startswith("recipe.yaml:14:11: metrics.every: 0 is not")
    (problem,) = refuse("train.max_epochs=3")
    assert problem.place == "command line 'train.max_epochs=3'"
    (problem,) = refuse(extra="name: a/b\n")
    assert problem.key == "name"


@pytest.mark.parametrize(
    ("extra", "hint"),
    [
        ("scheduler: torch.optim.Adam\n", "{_target_: torch.optim.Adam}"),
        ("scheduler: {_taget_: a.B}\n", "did you mean '_taget_'"),
        ("scheduler: {_target_: Adam}\n", "not a dotted path"),
        ("scheduler: {_target_: 'a.b:C'}\n", "write 'a.b.C'"),
        ("scheduler: {_target_: a.B, c: [{_target_: 3}]}\n", "not a dotted path"),
    ],
)
def test_a_target_is_a_mapping_with_a_dotted_path(refuse: Refuse, extra: str, hint: str) -> None:
    (problem,) = refuse(extra=extra)
    assert hint in problem.message


def test_marks_left_to_be_filled_in_are_problems(refuse: Refuse) -> None:
    problems = refuse("seed=???", "optimizer.lr=???")
    assert [problem.key for problem in problems] == ["optimizer.lr", "seed"]
    assert "still ???" in problems[0].message


def test_origins_and_places_name_every_layer(load_text: Load) -> None:
    loaded = load_text("backend.options.bucket_cap_mb=1", "seed=1")
    assert loaded.origins["seed"] == "command line 'seed=1'"
    assert loaded.origins["optimizer.lr"] == "recipe.yaml:7:3"
    assert loaded.origins["backend.adapter"] == "backends/ddp.yaml:3:1"
    assert loaded.origins["backend.name"] == "recipe.yaml:13:1"
    assert loaded.origins["launch.device"].startswith("launch/local.yaml:")
    assert loaded.origins["train.precision"] == "default"
    assert loaded.place("train.precision") == "recipe.yaml:11:1"
    assert loaded.place("metrics.every") == "recipe.yaml"
    assert loaded.place("batch.micro_batch_size") == "recipe.yaml:10:3"


def test_the_recipe_goes_before_its_launch_profile(load_text: Load) -> None:
    assert load_text(extra="launch: {timeout_seconds: 5}\n").recipe.launch.timeout_seconds == 5.0


def test_a_file_that_is_not_there_or_no_recipe_is_one_problem(tmp_path: Path) -> None:
    def message(path: str | Path) -> str:
        with pytest.raises(RecipeError) as caught:
            load(path, options_of=options_of)
        (problem,) = caught.value.problems
        return str(problem)

    assert "no such file" in message(tmp_path / "nope.yaml")
    assert "is a folder" in message(tmp_path)
    for content, hint in [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n", "the top level is a list"),
        (b"seed\n", "the top level is 'seed'"),
        (b"a: 1\nname: \xe9\n", "bad.yaml:2:1: is not UTF-8"),
        (b"a: 1\nb: x\x07\n", "bad.yaml:2:5: the character"),
        (b"a:\n\tb: 1\n", "bad.yaml:2:1: not valid YAML"),
        (b"a: [1\n", "not valid YAML"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"match: *.bias\n", "needs quotes"),
    ]:
        (tmp_path / "bad.yaml").write_bytes(content)
        assert hint in message(tmp_path / "bad.yaml"), content


def test_a_shipped_recipe_is_found_by_name_and_a_near_one_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits-resnet.yaml").write_text(SOUND)
    monkeypatch.setattr("shardkit.shipped.files", lambda kind: _files(kind, tmp_path))
    monkeypatch.chdir(tmp_path)
    loaded = load("digits-resnet", options_of=options_of)
    assert loaded.place("batch") == "recipes/digits-resnet.yaml:8:1"
    for path in ("digits-resnt", "recipes/digits-resnet.yaml"):
        with pytest.raises(RecipeError, match="did you mean 'digits-resnet'"):
            load(path, options_of=options_of)


def _files(kind: str, folder: Path) -> dict[str, Path]:
    own = {path.stem: path for path in folder.glob("*.yaml")}
    return own if kind == "recipes" else {path.stem: path for path in (ROOT / kind).glob("*.yaml")}
