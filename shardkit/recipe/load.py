"""Loads a recipe: layers, places, types, interpolations and rules, with every problem told at once.

Schema defaults < launch profile < backend preset < recipe file < `key=value`. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardkit import shipped
from shardkit.errors import Problem, RecipeError
from shardkit.recipe import backend, rules
from shardkit.recipe import overrides as command_line
from shardkit.recipe.fields import Reader
from shardkit.recipe.interpolation import resolve
from shardkit.recipe.layers import Layers
from shardkit.recipe.positions import read_document
from shardkit.recipe.schema import Recipe
from shardkit.recipe.suggest import did_you_mean
from shardkit.recipe.tree import Key, Leaf, Section, Tree, dotted, entries
from shardkit.recipe.writing import written

DEFAULT = "default"


@dataclass(frozen=True)
class Loaded:
    """A recipe with everything resolved, and where each of its values came from."""

    recipe: Recipe
    origins: Mapping[str, str]
    # Dotted key -> "recipes/x.yaml:3:7", "command line 'k=v'", "backends/zero2.yaml:2:1" or "default".
    path: str
    # The recipe's file, as it was asked for.

    def place(self, key: str) -> str:
        """Where a key is given, or the nearest section around it that is."""
        return _place(self.origins, key, self.path)

    def to_yaml(self) -> str:
        """The resolved recipe, with the origin of each value that is no default; loads to the same recipe."""
        return written(asdict(self.recipe), self.origins, DEFAULT)


def load(path: str | Path, overrides: Sequence[str] = (), *, options_of: backend.OptionsOf) -> Loaded:
    """Load a recipe from a file, or one that comes with shardkit by its name.

    `options_of` gives the options dataclass of an adapter, or None when they can only be checked later.

    Raises:
        RecipeError: all its problems, in the order of their places.
    """
    file, shown = _find(str(path))
    problems: list[Problem] = []
    root = read_document(file, shown, problems)
    layers = Layers(root, file.parent, problems)
    for override in overrides:
        try:
            command_line.apply(root, override, layers.expand_backend)
        except RecipeError as error:
            problems += error.problems
    layers.expand_backend()
    layers.underlay_profile()
    options = backend.options_type(root, options_of, problems)
    reader = Reader(problems, {backend.OPTIONS: options} if options else {})
    values = reader.read(root, Recipe)
    if reader.references:
        resolve(values, reader)
    origins = _origins(values, root)
    recipe = rules.make(Recipe, values)
    complain = _complainer(origins, root.place, problems)
    rules.check(recipe, complain)
    if options and isinstance(values["backend"], dict):
        backend.check_rules(options, values["backend"]["options"], complain)
    if problems:
        raise RecipeError(sorted(problems, key=_order))
    return Loaded(recipe, origins, shown)


def _find(path: str) -> tuple[Path, str]:
    """The recipe's file, and what to call it."""
    names = shipped.files("recipes")
    if Path(path).exists() or path.endswith("/"):
        return Path(path), path or "."
    if path in names:
        return names[path], shipped.shown("recipes", path)
    hint = did_you_mean(Path(path).stem, names)
    known = f"; the recipes that come with shardkit are {', '.join(names)}" if names and not hint else ""
    raise RecipeError([Problem(place=path, key="", message=f"no such file, and no shipped recipe{hint or known}")])


def _origins(values: Any, tree: Tree | None, key: Key = (), place: str = DEFAULT) -> dict[str, str]:
    """The place of every key in the resolved values."""
    place = tree.place if tree else place
    origins = {dotted(key): place}
    for name, value in entries(values):
        if tree is None or isinstance(tree, Leaf):  # what an interpolation brings stands where it is written
            origins |= _origins(value, None, (*key, name), place)
        else:
            children: Any = tree.children
            child = children.get(name) if isinstance(tree, Section) else children[name]
            origins |= _origins(value, child, (*key, name))
    return origins


def _place(origins: Mapping[str, str], key: str, otherwise: str) -> str:
    while key and origins.get(key, DEFAULT) == DEFAULT:
        key = key.rpartition(".")[0]
    return origins[key] if key else otherwise


def _complainer(origins: Mapping[str, str], root: str, problems: list[Problem]) -> rules.Complain:
    def complain(key: Key, message: str) -> None:
        name = dotted(key)
        problems.append(Problem(place=_place(origins, name, root), key=name, message=message))

    return complain


def _order(problem: Problem) -> tuple[str, int, int, str]:
    """Lines and columns in the order of numbers."""
    match = re.fullmatch(r"(.*):(\d+):(\d+)", problem.place)
    path, line, column = match.groups() if match else (problem.place, 0, 0)
    return path, int(line), int(column), problem.key
