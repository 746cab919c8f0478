"""Reads a tree into the values a schema asks for, and collects everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from shardkit.errors import Problem
from shardkit.recipe import scalars
from shardkit.recipe.expected import describe, is_required, unknown
from shardkit.recipe.scalars import Wrong
from shardkit.recipe.schema import TARGET
from shardkit.recipe.suggest import did_you_mean, nearest
from shardkit.recipe.tree import Items, Key, Leaf, Section, Tree, dotted

_SCALARS = {str: scalars.text, bool: scalars.truth, int: scalars.whole_number, float: scalars.number}
_DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass
class Reference:
    """A value with an interpolation in it, which can be read when the rest of the recipe is known."""

    key: Key
    leaf: Leaf
    hint: Any


class Reader:
    """Reads trees; what is broken or still to be resolved is MISSING in the values it returns."""

    def __init__(self, problems: list[Problem], partial: Mapping[Key, type] | None = None) -> None:
        self.problems = problems
        self.references: list[Reference] = []
        self.partial = partial or {}
        # Keys whose values are those of a dataclass, without its defaults.

    def read(self, tree: Tree, hint: Any, key: Key = ()) -> Any:
        """The value of a tree; MISSING when it has a problem, or waits for others."""
        if isinstance(tree, Leaf) and tree.kind == "broken":
            return MISSING
        if isinstance(tree, Leaf) and tree.refers:
            self.references.append(Reference(key, tree, hint))
            return MISSING
        try:
            if isinstance(tree, Leaf) and tree.kind != "value" and tree.value == MISSING:
                raise Wrong(f"is still {MISSING}; give it a value")
            return self._read(tree, self.partial.get(key, hint), key)
        except Wrong as wrong:
            self.complain(tree.place, key, str(wrong))
            return MISSING

    def complain(self, place: str, key: Key, message: str) -> None:
        self.problems.append(Problem(place=place, key=dotted(key), message=message))

    def _read(self, tree: Tree, hint: Any, key: Key) -> Any:
        origin = get_origin(hint)
        if origin is Annotated:
            return self._target(tree, key)
        if origin in (Union, types.UnionType):
            return self._union(tree, hint, key)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self._section(tree, hint, key)
        if origin is list or hint is list:
            return self._list(tree, hint, key)
        if origin is dict or hint is dict:
            return self._dict(tree, hint, key)
        if origin is Literal:
            return scalars.choice(_leaf(tree, hint), get_args(hint))
        if hint in _SCALARS:
            value = _SCALARS[hint](_leaf(tree, hint))
            return _dotted_path(value) if key[-1:] == (TARGET,) else value
        return self._anything(tree, key)

    def _anything(self, tree: Tree, key: Key) -> Any:
        if isinstance(tree, Section):
            hints = {TARGET: str}
            return {name: self.read(child, hints.get(name, Any), (*key, name)) for name, child in tree.children.items()}
        if isinstance(tree, Items):
            return [self.read(child, Any, (*key, index)) for index, child in enumerate(tree.children)]
        return scalars.anything(tree)

    def _target(self, tree: Tree, key: Key) -> dict[str, Any]:
        if not isinstance(tree, Section):
            word = tree.value if isinstance(tree, Leaf) else None
            example = f"{{{TARGET}: {word if isinstance(word, str) and word else 'my_package.Thing'}}}"
            raise Wrong(f"{_found(tree)}; expected a mapping with {TARGET}, as in {example}")
        if TARGET not in tree.children:
            hint = did_you_mean(TARGET, tree.children)
            raise Wrong(f"has no {TARGET}; expected the dotted path of what to build, as in 'torch.optim.SGD'{hint}")
        return self._anything(tree, key)

    def _union(self, tree: Tree, hint: Any, key: Key) -> Any:
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        if len(choices) < len(get_args(hint)) and isinstance(tree, Leaf) and scalars.is_null(tree):
            return None
        if len(choices) == 1:
            return self._read(tree, choices[0], key)
        for choice in choices:
            try:
                return self._read(tree, choice, key)
            except Wrong:
                continue
        leaf = _leaf(tree, hint)
        words = [str(word) for choice in choices if get_origin(choice) is Literal for word in get_args(choice)]
        raise Wrong(f"{leaf.value!r} is not {describe(hint)}{did_you_mean(str(leaf.value), words)}")

    def _list(self, tree: Tree, hint: Any, key: Key) -> list[Any]:
        if isinstance(tree, Leaf) and tree.empty:
            return []
        if isinstance(tree, Section) and all(name.isdecimal() for name in tree.children):
            raise Wrong(f"the list has no such item; set it as a whole: {dotted(key)}=[...]")
        if not isinstance(tree, Items):
            text = tree.value if isinstance(tree, Leaf) and tree.kind == "plain" else ""
            example = f"[{', '.join(part.strip() for part in text.split(','))}]" if text else "[first, second]"
            raise Wrong(f"{_found(tree)}; expected {describe(hint)}, as in {example}")
        (inner,) = get_args(hint) or (Any,)
        return [self.read(child, inner, (*key, index)) for index, child in enumerate(tree.children)]

    def _dict(self, tree: Tree, hint: Any, key: Key) -> dict[str, Any]:
        if isinstance(tree, Leaf) and tree.empty:
            return {}
        if not isinstance(tree, Section):
            raise Wrong(f"{_found(tree)}; expected a mapping, as in {{name: value}}")
        _, inner = get_args(hint) or (str, Any)
        if inner is Any:
            return self._anything(tree, key)
        return {name: self.read(child, inner, (*key, name)) for name, child in tree.children.items()}

    def _section(self, tree: Tree, schema: type, key: Key) -> dict[str, Any]:
        fields = {field.name: field for field in dataclasses.fields(schema)}
        required = [name for name, field in fields.items() if is_required(field)]
        whole = key not in self.partial
        if isinstance(tree, Leaf) and tree.empty:
            if required:
                raise Wrong(f"is empty; expected {describe(schema)}")
            tree = Section(tree.place)
        if not isinstance(tree, Section):
            instead = "" if required else "; leave it out to have its defaults"
            raise Wrong(f"{_found(tree)}; expected {describe(schema)}{instead}")
        hints = get_type_hints(schema, include_extras=True)
        values: dict[str, Any] = {}
        for name, child in tree.children.items():
            if name in fields:
                values[name] = self.read(child, hints[name], (*key, name))
            else:
                self.complain(child.place, (*key, name), unknown(name, list(fields)))
                meant = nearest(name, fields)
                if meant and meant not in tree.children:
                    values[meant] = MISSING
        for name, field in fields.items():
            if name not in values and name in required:
                self.complain(tree.place, (*key, name), f"is missing; expected {describe(hints[name])}")
                values[name] = MISSING
            elif name not in values and whole:
                values[name] = _default(field)
        return {name: values[name] for name in fields if name in values}


def _dotted_path(path: str) -> str:
    if _DOTTED_PATH.fullmatch(path):
        return path
    corrected = path.replace(":", ".")
    hint = f"; write {corrected!r}" if _DOTTED_PATH.fullmatch(corrected) else ""
    raise Wrong(f"{path!r} is not a dotted path, as in 'torch.optim.SGD'{hint}")


def _leaf(tree: Tree, hint: Any) -> Leaf:
    if isinstance(tree, Leaf):
        return tree
    raise Wrong(f"{_found(tree)}; expected {describe(hint)}")


def _found(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return "is empty" if tree.empty else "is null" if scalars.is_null(tree) else f"is {tree.value!r}"
    return "is a mapping" if isinstance(tree, Section) else "is a list"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    value: Any = field.default_factory()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
