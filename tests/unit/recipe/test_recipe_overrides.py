from __future__ import annotations

import pytest

from tests.unit.recipe.conftest import Load, Refuse

GROUPS = "parameter_groups: [{match: '*.weight', options: {weight_decay: 0.1}}, {match: x}]\n"


def test_a_list_is_replaced_and_its_items_can_be_reached(load_text: Load) -> None:
    assert load_text("blocks=[a, 'b c']").recipe.blocks == ["a", "b c"]
    groups = load_text("parameter_groups.0.match=*.bias", "parameter_groups[1].match=y", extra=GROUPS)
    assert [group.match for group in groups.recipe.parameter_groups] == ["*.bias", "y"]
    assert groups.recipe.parameter_groups[0].options == {"weight_decay": 0.1}
    loaded = load_text("data.train.sizes=[1,2]", "data.train.sizes.1=9")
    assert loaded.recipe.data.train["sizes"] == [1, 9]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("parameter_groups.2.match=x", "items 0 to 1"),
        ("parameter_groups.x.match=x", "no item 'x'"),
        ("parameter_groups=1,2", "parameter_groups=[1,2]"),
        ("blocks=a,b", "as in [a, b]"),
        ("blocks.0=a", "blocks=[...]"),
        ("blocks=[*.a]", "needs quotes"),
        ("model={a:1}", "write 'a: 1'"),
        ("seed", "expected key=value"),
        ("--seed=1", "drop it: seed=1"),
        ("+seed=1", "drop it: seed=1"),
        ("=1", "is no key"),
        ("train..max_steps=1", "is no key"),
        ("seed=", "seed=null"),
        ("optimizer.lr.x=1", "set optimizer.lr as a whole"),
        ("train.max_step=1", "did you mean 'max_steps'"),
        ("trian.max_steps=1", "did you mean 'train'"),
        ("train=3", "expected a section"),
        ("model=[1", "not valid YAML"),
    ],
)
def test_an_override_without_effect_is_refused(refuse: Refuse, override: str, hint: str) -> None:
    (problem,) = refuse(override, extra=GROUPS if "groups" in override else "")
    assert problem.place == f"command line {override!r}"
    assert hint in problem.message


def test_text_in_place_of_an_untyped_list_is_refused(refuse: Refuse) -> None:
    (problem,) = refuse("data.train.sizes=[1,2]", "data.train.sizes=1,2")
    assert "write data.train.sizes=[1,2]" in problem.message


def test_values_are_taken_as_written(load_text: Load) -> None:
    train = load_text("data.train.path=a=b #c: d", "data.train.lr=1e-3", "data.train.n='7'").recipe.data.train
    assert (train["path"], train["lr"], train["n"]) == ("a=b #c: d", 1e-3, "7")


def test_the_later_of_two_overrides_wins(load_text: Load) -> None:
    assert load_text("seed=x", "seed=2", "seed=3").recipe.seed == 3


def test_an_override_sets_a_section_as_a_whole(load_text: Load) -> None:
    optimizer = load_text("optimizer={_target_: torch.optim.AdamW}").recipe.optimizer
    assert optimizer == {"_target_": "torch.optim.AdamW"}
    recipe = load_text("train.max_steps=null", "train.max_epochs=2", "data.eval={_target_: a.B}").recipe
    assert (recipe.train.max_steps, recipe.train.max_epochs) == (None, 2)
    assert recipe.data.eval == {"_target_": "a.B"}


def test_a_section_that_is_null_can_be_filled(load_text: Load) -> None:
    recipe = load_text("scheduler._target_=a.B", "scheduler.x=1", extra="scheduler: null\n").recipe
    assert recipe.scheduler == {"_target_": "a.B", "x": 1}
