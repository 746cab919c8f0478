"""What each arm runs: its backend with the options that were asked for, and a comparison that is gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.compare.arms import ArmRequest, arms_of, on_backend
from shardkit.compare.jobs import PLAN, make_folder, plan
from shardkit.errors import RequestError
from tests.unit.recipe.conftest import SOUND

OPTION = "backend.options.reshard_after_forward=false"
OWN = "backend={name: fsdp2, adapter: fsdp2, options: {reshard_after_forward: false}}"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(SOUND)
    return tmp_path


def options(overrides: tuple[str, ...]) -> dict[str, object]:
    return ArmRequest(name="arm", recipe="recipe.yaml", overrides=overrides).load().recipe.backend.options


def test_options_of_the_command_line_reach_every_backend_that_is_named() -> None:
    fsdp2, hsdp = arms_of("recipe.yaml", ["backend=fsdp2", OPTION], backends=["fsdp2", "hsdp"])
    assert options(fsdp2.overrides)["reshard_after_forward"] is False
    assert options(hsdp.overrides) == {"reshard_after_forward": False, "replicas": 2}
    assert options(on_backend("recipe.yaml", [OPTION], "fsdp2")) == {"reshard_after_forward": False}
    mapping = "backend.options={reshard_after_forward: false}"
    assert options(on_backend("recipe.yaml", ["backend=fsdp2", mapping], "hsdp"))["reshard_after_forward"] is False


def test_a_backend_without_such_an_option_refuses_it() -> None:
    with pytest.raises(RequestError, match="reshard_after_forward: unknown key"):
        options(on_backend("recipe.yaml", ["backend=fsdp2", OPTION], "zero2"))


def test_the_recipes_own_backend_keeps_the_options_it_has_there() -> None:
    assert options(on_backend("recipe.yaml", [OWN], "fsdp2")) == {"reshard_after_forward": False}
    assert options(on_backend("recipe.yaml", [OWN], "hsdp")) == {"replicas": 2}
    # Whatever its name: it is no preset's.
    named = OWN.replace("name: fsdp2", "name: mine")
    assert options(on_backend("recipe.yaml", [named], "mine")) == {"reshard_after_forward": False}


def test_words_that_cannot_be_split_are_told() -> None:
    with pytest.raises(RequestError, match=r"--arm .* cannot be split into words: No closing quotation"):
        arms_of("recipe.yaml", [], arms=["x: a='b c=1"])


def test_a_comparison_is_not_gone_on_with_when_its_recipe_was_edited(project: Path) -> None:
    def begin() -> None:
        arm = ArmRequest(name="one", recipe="recipe.yaml", overrides=())
        plan(make_folder("compare", project / "out"), [arm], {"one": arm.load().recipe}, {"repeats": 2})

    begin()
    begin()
    (project / "recipe.yaml").write_text(SOUND + "\nseed: 7\n")
    with pytest.raises(RequestError, match=r"since then seed of arm one has changed\); give a new folder"):
        begin()
    (project / "out" / PLAN).write_text("{")
    with pytest.raises(RequestError, match=r"comparison.json cannot be read .*; give a new folder with --output"):
        begin()
