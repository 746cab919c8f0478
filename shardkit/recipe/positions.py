"""YAML with places: every key and value of a document, where it stands, and its text as it was written.

What text without quotes means is decided later, by the field it is for: so `name: 0123` stays '0123', and
`lr: 1e-4` is a number. Keys are always text. Aliases and `<<` work; tags other than `!!str` are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from shardkit.errors import Problem, RecipeError
from shardkit.recipe.tree import Items, Key, Leaf, Section, Tree, dotted

At = Callable[[yaml.Mark], str]  # where a mark is, in the words of an error

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the second is ten times slower
_MOST_VALUES = 100_000  # more than any recipe; aliases of aliases of aliases stop here
_DEEPEST = 60
_TAGS = {"plain", "quoted", "tree", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))}
_STAND_INS = str.maketrans("{}[],:", "\uf8d0\uf8d1\uf8d2\uf8d3\uf8d4\uf8d5")
_STOOD_FOR = str.maketrans("\uf8d0\uf8d1\uf8d2\uf8d3\uf8d4\uf8d5", "{}[],:")
_REFERENCE = re.compile(r"\$\{[^{}\"'\n]*(?:\$?\{[^{}\"'\n]*\}[^{}\"'\n]*)*\}")


def read_document(path: Path, shown: str, problems: list[Problem]) -> Section:
    """The tree of a YAML file whose top level is a mapping; `shown` is its path in messages.

    Raises:
        RecipeError: it cannot be read as YAML at all.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise _failure(shown, "no such file") from None
    except IsADirectoryError:
        raise _failure(shown, "is a folder; expected a YAML file") from None
    except OSError as error:
        raise _failure(shown, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _failure(f"{shown}:{line}:1", "is not UTF-8 text; save it as UTF-8") from error
    tree = compose(text, lambda mark: f"{shown}:{mark.line + 1}:{mark.column + 1}", (), problems)
    if tree is None:
        raise _failure(f"{shown}:1:1", "is empty; expected sections, as in `seed: 0`")
    if not isinstance(tree, Section):
        found = "a list" if isinstance(tree, Items) else repr(tree.value)
        raise _failure(tree.place, f"the top level is {found}; expected keys with values, as in `seed: 0`")
    return tree


def compose(text: str, at: At, key: Key, problems: list[Problem]) -> Tree | None:
    """The tree of one YAML text; None when there is nothing in it. `key` is where the tree will hang.

    Raises:
        RecipeError: the text is not YAML.
    """
    try:
        root = node_of(text)
        return None if root is None else _Composer(at, problems).tree(root, at(root.start_mark), key)
    except RecursionError:  # only of the loader without libyaml
        place = at(yaml.Mark("", 0, 0, 0, None, 0))
        raise _failure(place, "not valid YAML: nested too deep", dotted(key)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = at(mark) if mark else at(yaml.Mark("", 0, 0, 0, None, 0))
        raise _failure(place, _explain(error), dotted(key)) from error
    except yaml.reader.ReaderError as error:
        before = text.encode()[: error.position].decode(errors="replace")
        line, column = before.count("\n"), len(before) - before.rfind("\n") - 1
        place = at(yaml.Mark("", 0, line, column, None, 0))
        raise _failure(place, f"the character {chr(error.character)!r} is not allowed", dotted(key)) from error


def node_of(text: str) -> yaml.Node | None:
    """The nodes of one YAML text with their marks; None when there is nothing in it. Scalars are as in `_Loader`.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    # Punctuation inside ${...} is hidden from YAML, so that {T_max: ${train.max_steps}} can be written.
    return _Loader(_REFERENCE.sub(lambda match: match[0].translate(_STAND_INS), text)).get_single_node()


def _failure(place: str, message: str, key: str = "") -> RecipeError:
    return RecipeError([Problem(place=place, key=key, message=message)])


def _explain(error: yaml.MarkedYAMLError) -> str:
    said = " ".join(part for part in (error.context, error.problem) if part).translate(_STOOD_FOR)
    if "alias" in said:
        return f"not valid YAML: {said}; text that starts with * needs quotes, as in '*.bias'"
    if "cannot start any token" in said:
        return f"not valid YAML: {said}; indent with spaces, not tabs, and quote text that starts with @, ` or %"
    if "mapping values are not allowed" in said:
        return f"not valid YAML: {said}; check the indentation, and quote text with ': ' in it"
    return f"not valid YAML: {said}"


class _Loader(_YamlLoader):
    """Tells apart text with and without quotes instead of guessing types."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return "plain" if implicit[0] else "quoted"
        return "tree"


class _Composer:
    """Turns nodes into trees, and collects what a recipe does not allow."""

    def __init__(self, at: At, problems: list[Problem]) -> None:
        self.at = at
        self.problems = problems
        self.count = 0

    def tree(self, node: yaml.Node, place: str, key: Key, above: tuple[yaml.Node, ...] = ()) -> Tree:
        self.count += 1
        if self.count > _MOST_VALUES:
            raise _failure(place, f"has more than {_MOST_VALUES} values once its aliases are unfolded", dotted(key))
        if any(node is parent for parent in above):
            raise _failure(place, "an alias stands inside what it is an alias of", dotted(key))
        if len(above) > _DEEPEST:
            raise _failure(place, f"is nested more than {_DEEPEST} levels deep", dotted(key))
        if node.tag not in _TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.complain(place, key, f"has the tag {tag!r}; expected a value without a tag")
            return Leaf(place, None, "broken")
        if isinstance(node, yaml.MappingNode):
            return Section(place, dict(self.children(node, key, (*above, node))))
        if isinstance(node, yaml.SequenceNode):
            pairs = enumerate(node.value)
            return Items(place, [self.tree(n, self.at(n.start_mark), (*key, i), (*above, node)) for i, n in pairs])
        kind = "plain" if node.tag == "plain" else "quoted"
        return Leaf(place, node.value.translate(_STOOD_FOR), kind)

    def children(self, node: yaml.MappingNode, key: Key, above: tuple[yaml.Node, ...]) -> Iterator[tuple[str, Tree]]:
        """The entries; those of a `<<` come first, so that the mapping's own replace them."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for name_node, node_of_value in node.value:
            place = self.at(name_node.start_mark)
            if not isinstance(name_node, yaml.ScalarNode):
                self.complain(place, key, "a key is a mapping or a list; expected text")
                continue
            name = name_node.value.translate(_STOOD_FOR)
            if name == "<<" and name_node.tag == "plain":
                yield from self.merged(node_of_value, place, key, above)
                continue
            empty = isinstance(node_of_value, yaml.ScalarNode) and (
                node_of_value.tag,
                node_of_value.value,
            ) == ("plain", "")
            if node.flow_style and ":" in name and name_node.tag == "plain" and empty:
                hint = name.replace(":", ": ", 1)
                self.complain(place, key, f"{name!r} is a key without a value; write {hint!r}, with a space")
            elif name in own:
                first = self.at(own[name][0].start_mark)
                self.complain(place, (*key, name), f"is given twice, first at {first}; keep one of them")
            else:
                own[name] = (name_node, node_of_value)
        for name, (name_node, node_of_value) in own.items():
            yield name, self.tree(node_of_value, self.at(name_node.start_mark), (*key, name), above)

    def merged(self, node: yaml.Node, place: str, key: Key, above: tuple[yaml.Node, ...]) -> Iterator[tuple[str, Tree]]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in reversed(sources):  # the first of a list wins
            if not isinstance(source, yaml.MappingNode) or any(source is parent for parent in above):
                self.complain(place, key, "<< merges another mapping; expected an alias of one, as in `<<: *name`")
                continue
            yield from self.children(source, key, (*above, source))

    def complain(self, place: str, key: Key, message: str) -> None:
        self.problems.append(Problem(place=place, key=dotted(key), message=message))
