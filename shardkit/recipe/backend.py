"""The backend of a recipe: what a name or a path stands for, and the same for people with their own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardkit import shipped
from shardkit.errors import BackendError, Problem, RecipeError
from shardkit.recipe import rules
from shardkit.recipe.fields import Reader
from shardkit.recipe.positions import read_document
from shardkit.recipe.scalars import is_null
from shardkit.recipe.schema import Backend
from shardkit.recipe.suggest import did_you_mean
from shardkit.recipe.tree import Key, Leaf, Section, Tree, tree_of

OptionsOf = Callable[[str], "type | None"]

OPTIONS: Key = ("backend", "options")


def load_backend(backend: str | Mapping[str, Any], *, options_of: OptionsOf) -> Backend:
    """A backend from its name, the path of its file, `my_package.module:MyEngine`, or a mapping with adapter.

    Raises:
        RecipeError: all that is wrong with it.
    """
    problems: list[Problem] = []
    root = Section("", {"backend": tree_of(backend if isinstance(backend, str) else dict(backend), "")})
    expand(root, Path(), problems)
    options = options_type(root, options_of, problems)
    reader = Reader(problems, {OPTIONS: options} if options else {})
    values = reader.read(root.children["backend"], Backend, ("backend",))
    if not problems and options:
        check_rules(options, values["options"], lambda key, message: reader.complain("", key, message))
    if problems:
        raise RecipeError(problems)
    return rules.make(Backend, values)


def expand(root: Section, folder: Path, problems: list[Problem]) -> None:
    """Replace a backend's name or path by what its file says; a mapping gets a name."""
    backend = root.children.get("backend")
    if isinstance(backend, Leaf) and backend.sound:
        root.children["backend"] = _preset(backend, folder, problems)
    elif isinstance(backend, Section):
        adapter = backend.children.get("adapter")
        name = str(adapter.value) if isinstance(adapter, Leaf) and not is_null(adapter) else "inline"
        backend.children.setdefault("name", Leaf(backend.place, name))


def options_type(root: Section, options_of: OptionsOf, problems: list[Problem]) -> type | None:
    """The options dataclass of the recipe's adapter, where it is known."""
    backend = root.children.get("backend")
    adapter = backend.children.get("adapter") if isinstance(backend, Section) else None
    if not isinstance(adapter, Leaf) or not adapter.sound or is_null(adapter):
        return None
    try:
        return options_of(str(adapter.value))
    except BackendError as error:
        problems.append(Problem(place=adapter.place, key="backend.adapter", message=str(error)))
        return None


def check_rules(options: type, given: dict[str, Any], complain: rules.Complain) -> None:
    """Ask the options dataclass, if it has rules, about options that are sound."""
    if not rules.is_broken(given):
        rules.check(rules.make(options, given), complain, OPTIONS)


def _preset(word: Leaf, folder: Path, problems: list[Problem]) -> Tree:
    """The mapping a backend's name stands for."""

    def broken(message: str, place: str = word.place, key: str = "backend") -> Leaf:
        problems.append(Problem(place=place, key=key, message=message))
        return Leaf(place, None, "broken")

    names = list(shipped.files("backends"))
    if is_null(word) or not isinstance(word.value, str):
        found = "is empty" if word.empty else f"is {word.value!r}"
        return broken(f"{found}; expected {Backend.EXPECTED}; the names are {', '.join(names)}")
    name = word.value
    path, shown = _file(name, folder)
    if path is None and ":" in name:
        return Section(word.place, {"name": Leaf(word.place, name), "adapter": Leaf(word.place, name)})
    if path is None:
        expected = f"expected one of {', '.join(names)}, or a path to a .yaml file"
        return broken(f"no backend is named {name!r}; {expected}{did_you_mean(name, names)}")
    try:
        section = read_document(path, shown, problems)
    except RecipeError as error:
        (problem,) = error.problems
        if problem.place == shown:  # it cannot even be opened: the fault is with its name
            return broken(f"{name!r}: {problem.message}")
        return broken(problem.message, problem.place)
    if "adapter" not in section.children:
        missing = broken("is missing; expected the name of an adapter", section.place, "backend.adapter")
        section.children["adapter"] = missing
    return Section(word.place, {"name": Leaf(word.place, path.stem), **section.children})


def _file(name: str, folder: Path) -> tuple[Path | None, str]:
    """Where a backend's file is, and its name in messages; a path may start at the recipe's folder."""
    files = shipped.files("backends")
    if name in files:
        return files[name], shipped.shown("backends", name)
    if not name.endswith((".yaml", ".yml")) and ("/" not in name or ":" in name):
        return None, name
    beside = folder / name
    if beside.is_file() and not Path(name).is_file():
        return beside, str(beside)
    return Path(name), name
