from __future__ import annotations

import pytest

from shardkit.errors import Problem, RecipeError
from shardkit.recipe.positions import compose
from shardkit.recipe.tree import Items, Leaf, Section, Tree

# Each list holds ten times the one before.
LAUGHS = "a: &a [1]\n" + "".join(
    f"{new}: &{new} [{f'*{old},' * 10}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)


def read(text: str, problems: list[Problem] | None = None) -> Tree:
    found = [] if problems is None else problems
    tree = compose(text, lambda mark: f"{mark.line + 1}:{mark.column + 1}", (), found)
    assert tree is not None
    if problems is None:
        assert not found
    return tree


def section(text: str) -> dict[str, Tree]:
    tree = read(text)
    assert isinstance(tree, Section)
    return tree.children


def test_every_key_and_item_has_its_line_and_column() -> None:
    tree = section("a: {b: 1}\nc:\n  - x\n  - {d: 2}\n")
    inside, items = tree["a"], tree["c"]
    assert isinstance(inside, Section)
    assert isinstance(items, Items)
    assert (tree["a"].place, inside.children["b"].place) == ("1:1", "1:5")
    assert [item.place for item in items.children] == ["3:5", "4:5"]


def test_columns_count_characters() -> None:
    tree = section("\u00e9\U0001f600: {b: 1}\n")["\u00e9\U0001f600"]
    assert isinstance(tree, Section)
    assert tree.children["b"].place == "1:6"


def test_text_keeps_its_quoting() -> None:
    tree = section("a: 1\nb: '1'\nc: !!str 1\nd: |\n  1\n")
    assert [leaf.kind for leaf in tree.values() if isinstance(leaf, Leaf)] == [
        "plain",
        "quoted",
        "quoted",
        "quoted",
    ]


def test_an_interpolation_needs_no_quotes_inside_braces() -> None:
    tree = section("{a: ${b.c}, d: [${oc.env:X,{e: 1}}, 2], f: x}")
    items = tree["d"]
    assert isinstance(tree["a"], Leaf)
    assert isinstance(items, Items)
    assert tree["a"].value == "${b.c}"
    assert [item.value for item in items.children if isinstance(item, Leaf)] == ["${oc.env:X,{e: 1}}", "2"]


def test_aliases_and_merge_keys_work() -> None:
    tree = section("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\ne: *x\nf: {<<: [{b: 7}, *x]}\n")

    def values(name: str) -> dict[str, object]:
        found = tree[name]
        assert isinstance(found, Section)
        return {key: leaf.value for key, leaf in found.children.items() if isinstance(leaf, Leaf)}

    assert (values("d"), values("e")) == ({"b": "1", "c": "3"}, {"b": "1", "c": "2"})
    assert values("f") == {"b": "7", "c": "2"}


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "3:1", "first at 1:1"),
        ("a: {b: {c: 1, c: 2}}\n", "1:15", "first at 1:9"),
        ("a: {b:1}\n", "1:5", "write 'b: 1'"),
        ("? [a]\n: 1\n", "1:3", "expected text"),
        ("a: !!int 3\n", "1:1", "tag '!!int'"),
        ("a: !b {c: 3}\n", "1:1", "tag '!b'"),
        ("<<: 3\n", "1:1", "merges another mapping"),
    ],
)
def test_what_a_recipe_does_not_allow_is_a_problem_with_its_place(text: str, place: str, message: str) -> None:
    problems: list[Problem] = []
    read(text, problems)
    (problem,) = problems
    assert problem.place == place
    assert message in problem.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [*x]\n", "inside what it is an alias of"),
        ("a: " + "[" * 200 + "]" * 200, "levels deep"),
        ("a: " + "[" * 20_000, "not valid YAML"),
        (LAUGHS, "more than 100000 values"),
        ("a: @x\n", "quote text that starts with @"),
        ("a: b: c\n", "quote text with ': '"),
    ],
)
def test_what_cannot_be_read_is_one_problem(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        read(text)
    assert len(caught.value.problems) == 1
