from __future__ import annotations

from pathlib import Path

import pytest

from shardkit import shipped
from shardkit.engines import registry
from shardkit.errors import RecipeError
from shardkit.recipe.backend import load_backend
from tests.unit.recipe.conftest import Load, Refuse

ROOT = Path(__file__).parents[3]
NAMES = list(shipped.files("backends"))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_and_its_adapter_takes_its_options(load_text: Load, name: str) -> None:
    backend = load_text(f"backend={name}").recipe.backend
    assert backend.name == name
    options = registry.BUILT_IN[backend.adapter].options
    assert options(**backend.options)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_names_its_adapter_file_and_is_in_the_table(name: str) -> None:
    path = shipped.files("backends")[name]
    adapter = path.read_text().splitlines()[0].removeprefix("# Adapter: ")
    assert adapter.startswith("shardkit/engines/")
    target = registry.BUILT_IN[load_backend(name, options_of=registry.options_of).adapter].target
    assert adapter == target.partition(":")[0].replace(".", "/") + ".py"
    (row,) = [line for line in (path.parent / "README.md").read_text().splitlines() if f"({name}.yaml)" in line]
    assert f"`{adapter}`" in row


def test_the_presets_are_the_promised_ones() -> None:
    assert set(NAMES) == {
        *("single", "ddp", "fsdp2", "fsdp2-offload", "hsdp", "zero1", "zero2", "zero3", "zero3-offload"),
        *("accelerate-ddp", "accelerate-fsdp2", "accelerate-zero1", "accelerate-zero2", "accelerate-zero3"),
    }


def test_a_backend_on_the_command_line_replaces_the_whole_and_can_be_adjusted(load_text: Load) -> None:
    inline = "backend={adapter: deepspeed, options: {stage: 3}}"
    backend = load_text(inline, "backend=fsdp2", "backend.options.reshard_after_forward=false").recipe.backend
    assert (backend.name, backend.adapter) == ("fsdp2", "fsdp2")
    assert backend.options == {"reshard_after_forward": False}
    adjusted = load_text("backend.options.bucket_cap_mb=3").recipe.backend
    assert (adjusted.name, adjusted.options) == ("ddp", {"bucket_cap_mb": 3.0})


def test_a_backend_may_be_a_file_of_the_users_own(load_text: Load, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("adapter: deepspeed\noptions:\n  stage: 1\n")
    loaded = load_text("backend=mine.yaml")
    assert (loaded.recipe.backend.name, loaded.recipe.backend.options) == ("mine", {"stage": 1})
    assert loaded.origins["backend.options.stage"] == "mine.yaml:3:3"
    (tmp_path / "mine.yaml").write_text("adapter: deepspeed\noptions: {stag: 1}\n")
    (problem,) = refuse("backend=./mine.yaml")
    assert str(problem) == "./mine.yaml:2:11: backend.options.stag: unknown key; did you mean 'stage'?"
    (tmp_path / "mine.yaml").write_text("options: {stage: 1}\n")
    (problem,) = refuse("backend=mine.yaml")
    assert (problem.place, problem.key) == ("mine.yaml:1:1", "backend.adapter")
    (problem,) = refuse("backend=none.yaml")
    assert str(problem) == "command line 'backend=none.yaml': backend: 'none.yaml': no such file"


def test_a_path_may_start_at_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.recipe.load import load
    from tests.unit.recipe.conftest import SOUND

    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.yaml").write_text("adapter: single\n")
    (tmp_path / "deep" / "recipe.yaml").write_text(SOUND.replace("backend: ddp", "backend: mine.yaml"))
    monkeypatch.chdir(tmp_path)
    loaded = load("deep/recipe.yaml", options_of=registry.options_of)
    assert loaded.origins["backend.adapter"] == "deep/mine.yaml:1:1"


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("backend=zro2", "backend", "did you mean 'zero2'"),
        ("backend=null", "backend", "expected a name from backends/"),
        ("backend=[ddp]", "backend", "expected a name from backends/"),
        ("backend={adaptr: ddp}", "backend.adaptr", "did you mean 'adapter'"),
        ("backend={options: {}}", "backend.adapter", "missing"),
        ("backend={adapter: dpp}", "backend.adapter", "did you mean 'ddp'"),
        ("backend={adapter: deepspeed, options: {stage: 4}}", "backend.options.stage", "not one of 1, 2, 3"),
        ("backend.options.bucket_cap=1", "backend.options.bucket_cap", "did you mean 'bucket_cap_mb'"),
    ],
)
def test_a_wrong_backend_is_refused(refuse: Refuse, override: str, key: str, hint: str) -> None:
    (problem,) = refuse(override)
    assert (problem.place, problem.key) == (f"command line {override!r}", key)
    assert hint in problem.message


def test_an_adapter_of_someone_else_is_named_in_full(load_text: Load) -> None:
    backend = load_text("backend={adapter: 'their.engine:Engine', options: {anything: 1}}").recipe.backend
    assert (backend.name, backend.options) == ("their.engine:Engine", {"anything": 1})
    assert load_text("backend=their.engine:Engine").recipe.backend.adapter == "their.engine:Engine"


def test_people_with_their_own_loop_get_the_same_backends() -> None:
    given = {"adapter": "ddp", "options": {"bucket_cap_mb": 3}}
    assert load_backend(given, options_of=registry.options_of).options == {"bucket_cap_mb": 3.0}
    assert load_backend("zero1", options_of=registry.options_of).options == {"stage": 1}
    with pytest.raises(RecipeError, match="did you mean 'zero1'"):
        load_backend("zero11", options_of=registry.options_of)
    with pytest.raises(RecipeError, match="did you mean 'bucket_cap_mb'"):
        load_backend({"adapter": "ddp", "options": {"bucket_cap": 3}}, options_of=registry.options_of)
