"""`key=value` from the command line, put into a recipe's tree.

An override sets its key to its value: a mapping or a list replaces what was there. A value is YAML when it
starts with [, {, or a quote, and else one plain value as it is written: `match=*.bias` needs no more quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from shardkit.errors import Problem, RecipeError
from shardkit.recipe.positions import compose
from shardkit.recipe.scalars import is_null
from shardkit.recipe.tree import Items, Key, Leaf, Section, Tree


def apply(root: Section, override: str, expand: Callable[[], None]) -> None:
    """Put one override into the tree; `expand` turns a backend given by name into its mapping.

    Raises:
        RecipeError: it has no effect as it is written.
    """
    name, equals, text = override.partition("=")
    name, text = name.strip(), text.strip()
    place = f"command line {override!r}"
    if re.match(r"[-+~]", name):
        raise _refused(place, "", f"starts with {name[0]!r}; drop it: {override.lstrip('-+~ ')}")
    if not equals:
        raise _refused(place, "", "has no '='; expected key=value, as in seed=1")
    parts = re.sub(r"\[(\d+)\]", r".\1", name).split(".")
    if not all(parts):
        raise _refused(place, "", f"{name!r} is no key; expected names with dots between them, as in train.max_steps=5")
    if not text:
        raise _refused(place, name, f"is empty; write {name}=null for no value, or {name}=\"''\" for empty text")
    if parts[0] == "backend" and len(parts) > 1:
        expand()
    _assign(root, parts, _value(text, place, tuple(parts)), place)


def _value(text: str, place: str, key: Key) -> Tree:
    if text[0] not in "[{\"'":
        return Leaf(place, text, "plain")
    problems: list[Problem] = []
    tree = compose(text, lambda mark: place, key, problems)
    if problems or tree is None:
        raise RecipeError(problems)
    return tree


def _assign(root: Section, parts: list[str], value: Tree, place: str) -> None:
    holder: Section | Items = root
    for depth, part in enumerate(parts):
        key = ".".join(parts[: depth + 1])
        children = holder.children
        index = part if isinstance(children, dict) else _index(part, len(children), place, key)
        last = depth == len(parts) - 1
        old = children.get(part) if isinstance(children, dict) else children[int(index)]
        if last:
            _check_list(old, value, place, key)
            children[index] = value  # type: ignore[index]
            return
        if old is None or (isinstance(old, Leaf) and is_null(old) and old.kind != "broken"):
            old = children[index] = Section(place)  # type: ignore[index]
        if isinstance(old, Leaf):
            deeper = ".".join(parts[depth + 1 :])
            raise _refused(place, key, f"is {old.value!r}, which has no {deeper!r} inside; set {key} as a whole")
        holder = old


def _index(part: str, length: int, place: str, key: str) -> int:
    if part.isdecimal() and int(part) < length:
        return int(part)
    there = f"items 0 to {length - 1}" if length > 1 else "one item, 0" if length else "no items"
    raise _refused(place, key, f"there is no item {part!r}; the list has {there}; set the list as a whole to add some")


def _check_list(old: Tree | None, value: Tree, place: str, key: str) -> None:
    """Text that replaces a list is a slip of the pen."""
    if isinstance(old, Items) and isinstance(value, Leaf) and not (is_null(value) or value.refers):
        raise _refused(place, key, f"{value.value!r} is not a list, which {key} is; write {key}=[{value.value}]")


def _refused(place: str, key: str, message: str) -> RecipeError:
    return RecipeError([Problem(place=place, key=key, message=message)])
