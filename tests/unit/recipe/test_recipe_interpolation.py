from __future__ import annotations

import pytest

from tests.unit.recipe.conftest import Load, Refuse

SCHEDULER = "scheduler: {_target_: a.B, T_max: ${train.max_steps}, same: ${.T_max}, seed: ${..seed}}\n"


def test_references_keep_the_type_of_what_they_refer_to(load_text: Load) -> None:
    scheduler = load_text("train.max_steps=1e3", extra=SCHEDULER).recipe.scheduler
    assert scheduler == {"_target_": "a.B", "T_max": 1000, "same": 1000, "seed": 0}
    assert scheduler is not None
    assert type(scheduler["T_max"]) is int
    assert load_text("name=${seed}", "data.train.x=${name}").recipe.data.train["x"] == "0"
    assert load_text("data.train.x=${train.precision}").recipe.data.train["x"] == "fp32"
    assert load_text("data.eval=${data.train}").recipe.data.eval == load_text().recipe.data.train


def test_the_environment_is_read_as_if_written_in_the_recipe(load_text: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_TEST", "1e3")
    monkeypatch.delenv("SHARDKIT_NONE", raising=False)
    reference = "${oc.env:SHARDKIT_TEST}"
    recipe = load_text(f"seed={reference}", f"name={reference}", f"data.train.x={reference}").recipe
    assert (recipe.seed, recipe.name, recipe.data.train["x"]) == (1000, "1e3", 1000.0)
    recipe = load_text("data.train.x=${oc.env:SHARDKIT_NONE,3}", "seed=${data.train.x}").recipe
    assert (recipe.seed, recipe.data.train["x"]) == (3, 3)
    recipe = load_text("seed=${data.train.x}", "data.train.x=${data.train.y}", "data.train.y=${oc.env:SHARDKIT_NONE,3}")
    assert recipe.recipe.seed == 3


def test_a_backend_and_a_profile_can_be_chosen_by_the_environment(load_text: Load) -> None:
    recipe = load_text("backend=${oc.env:SHARDKIT_NONE,zero3}", "launch.profile=${oc.env:SHARDKIT_NONE,local}").recipe
    assert (recipe.backend.name, recipe.backend.options) == ("zero3", {"stage": 3})
    recipe = load_text("backend=${oc.env:SHARDKIT_NONE,fsdp2}", "backend.options.replicas=2").recipe
    assert recipe.backend.options == {"reshard_after_forward": True, "replicas": 2}


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("seed=${train.max_stepz}", "did you mean 'train.max_steps'"),
        ("seed=${trian.max_steps}", "did you mean 'train.max_steps'"),
        ("optimizer.lr=${.lrr}", "did you mean 'optimizer.lr'"),
        ("seed=${HOME}", "${oc.env:HOME}"),
        ("seed=${oc.env:SHARDKIT_NONE}", "SHARDKIT_NONE is not set"),
        ("seed=${seed}", "leads back to itself"),
        ("seed=${nope:3}", "nope"),
        ("seed=${oops", "not an interpolation"),
        ("seed=${name}", "it comes from ${name}"),
        ("data.train.x=${train.max_epochs}", "${train.max_epochs} is null"),
        ("data.train.x=a-${train.max_epochs}", "${train.max_epochs} is null"),
        ("seed=${train.max_epochs}", "${train.max_epochs} is null"),
        ("name=a-${data}", "cannot be put into text"),
        ("backend=${nope}", "no key 'nope'"),
    ],
)
def test_what_cannot_be_resolved_is_a_problem_at_its_place(refuse: Refuse, override: str, hint: str) -> None:
    (problem,) = refuse(override)
    assert problem.place == f"command line {override!r}"
    assert hint in problem.message


def test_a_cycle_is_told_where_it_is_written(refuse: Refuse) -> None:
    (problem,) = refuse(extra="scheduler: {_target_: a.B, x: ${.y}, y: ${.x}}\n")
    assert "leads back to itself" in problem.message
    assert problem.place in ("recipe.yaml:14:28", "recipe.yaml:14:38")
    (problem,) = refuse("data.train.x=${model}", "model.y=${data.train}")
    assert "leads back to itself" in problem.message
    (problem,) = refuse("data.eval=${data}")
    assert "leads back to itself" in problem.message


def test_null_is_fine_where_the_field_takes_it(load_text: Load) -> None:
    assert load_text("evaluation.every=${train.max_epochs}").recipe.evaluation.every is None


def test_a_reference_to_a_mistake_is_not_a_second_one(refuse: Refuse) -> None:
    (problem,) = refuse("train.max_steps=many", extra=SCHEDULER)
    assert problem.key == "train.max_steps"
    (problem,) = refuse("train.max_step=3", "train.max_steps=null", "train.max_epochs=2", "seed=${train.max_step}")[:1]
    assert problem.key in ("seed", "train.max_step")


def test_escaped_text_is_kept(load_text: Load) -> None:
    assert load_text(r"data.train.x=\${y} ${seed}").recipe.data.train["x"] == "${y} 0"
