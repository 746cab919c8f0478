from __future__ import annotations

import pytest
import yaml

from shardkit.recipe.editing import NoPlace, edited, plain

TEXT = """\
# What it shows.
model:
  width: 8      # narrow
  norm: {eps: 1e-5}   # small
# Before the backend.
backend: ddp    # a name
list:
  - {match: "*.bias"}
  - match: other
nothing:
deep:
  # inside
  one:
    two: 2
text: |
  a block
  of text

last: 1
"""


def test_a_value_is_replaced_and_comments_stay() -> None:
    found = edited(TEXT, ("model", "width"), "16")
    assert found == TEXT.replace("width: 8 ", "width: 16 ").replace("16      #", "16  #")
    assert edited(TEXT, ("model", "norm", "eps"), "0") == TEXT.replace("1e-5", "0")
    assert edited(TEXT, ("list", "0", "match"), "'x'") == TEXT.replace('"*.bias"', "'x'")
    assert edited(TEXT, ("list", "1", "match"), "x") == TEXT.replace("other", "x")


def test_a_block_takes_the_place_of_a_value_and_back() -> None:
    block = edited(TEXT, ("backend",), plain({"name": "x", "options": {"a": True, "b": []}}), {"options.a": "why"})
    assert "backend:  # a name\n  name: x\n  options:\n    a: true  # why\n    b: []\nlist:\n" in block
    assert edited(block, ("backend",), "ddp") == TEXT.replace("ddp    #", "ddp  #")


@pytest.mark.parametrize(
    "key, value, where",
    [
        (("new",), "3", "last: 1\nnew: 3\n"),
        (("model", "depth"), "3", "# small\n  depth: 3\n# Before"),
        (("model", "norm", "kind"), "a", "{eps: 1e-5, kind: a}   # small"),
        (("deep", "one", "three", "four"), "5", "    two: 2\n    three:\n      four: 5\ntext"),
        (("nothing", "at", "all"), "6", "nothing:\n  at:\n    all: 6\ndeep"),
    ],
)
def test_what_is_missing_is_added_where_it_belongs(key: tuple[str, ...], value: str, where: str) -> None:
    found = edited(TEXT, key, value)
    assert where in found
    node = yaml.safe_load(found)
    for part in key:
        node = node[part]
    assert str(node) == value
    assert [line.partition("#")[2] for line in found.splitlines()].count("") == found.count("\n") - TEXT.count("#")


def test_what_stands_in_the_way_is_told() -> None:
    for key in (("last", "deeper"), ("list", "9", "match"), ("list", "x")):
        with pytest.raises(NoPlace):
            edited(TEXT, key, "1")
    with pytest.raises(NoPlace):
        edited("a: [", ("a",), "1")


def test_texts_read_back_as_they_were() -> None:
    for value in ("null", "1.5", "a: b", "", "# x", "plain", None, True, 1.5, [1, "2"], {"a": ["x", None]}):
        assert yaml.safe_load(edited("k: 0\n", ("k",), plain(value))) == {"k": value}
