"""`_target_` mappings: bound to their signatures before any rank starts, and built on the ranks.

This is the second pass over a recipe: it imports what the recipe names, and so torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from shardkit.errors import Problem, RecipeError
from shardkit.recipe import rules
from shardkit.recipe.backend import OPTIONS, check_rules
from shardkit.recipe.fields import Reader
from shardkit.recipe.load import Loaded
from shardkit.recipe.schema import TARGET, Backend, Recipe, Target
from shardkit.recipe.suggest import did_you_mean, nearest
from shardkit.recipe.tree import Key, dotted, entries, tree_of

PARTIAL = "_partial_"
# Arguments that the engine passes, in front of the recipe's own.
_PASSED = {"optimizer": 1, "scheduler": 1}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _NotFound(Exception):
    """A dotted path leads nowhere; says which part."""


def check_targets(loaded: Loaded) -> list[Problem]:
    """What keeps the recipe's targets from being built, as far as that is known without a data set or a model."""
    recipe = loaded.recipe
    targets = {
        "model": recipe.model,
        "data.train": recipe.data.train,
        "data.eval": recipe.data.eval,
        "data.collate": recipe.data.collate,
        "loss": recipe.loss,
        "optimizer": recipe.optimizer,
        "scheduler": recipe.scheduler,
    }
    found = [complaint for key, target in targets.items() for complaint in _complaints(target, key)]
    found += _group_complaints(recipe)
    problems = [Problem(place=loaded.place(where), key=where, message=message) for where, message in found]
    return problems or _tried(loaded)


def _tried(loaded: Loaded) -> list[Problem]:
    """Build the optimizer and the scheduler on one weight, which finds what signatures do not tell."""
    import torch

    recipe = loaded.recipe
    key = "optimizer"
    try:
        optimizer = build(recipe.optimizer, [torch.nn.Parameter(torch.zeros(1))])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"is {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(f"{type(optimizer).__name__} evaluates the loss several times a step; use AdamW or SGD")
        if not all(0 <= group.get("lr", 0.0) < float("inf") for group in optimizer.param_groups):
            raise ValueError(f"lr {optimizer.param_groups[0]['lr']} is no learning rate; expected 0 or more")
        if recipe.scheduler is not None:
            key = "scheduler"
            build_scheduler(recipe.scheduler, optimizer)
    except Exception as error:  # whatever the class of the user's choice raises
        message = str(error) if isinstance(error, RecipeError) else f"cannot be built: {type(error).__name__}: {error}"
        return [Problem(place=loaded.place(key), key=key, message=message)]
    return []


def build_scheduler(target: Target, optimizer: Any) -> Any:
    """A scheduler on `optimizer`, which nested ones get as well, as those of SequentialLR want it."""
    inner = {name: _scheduled(value, optimizer) for name, value in target.items()}
    return build(inner, optimizer)


def _scheduled(value: Any, optimizer: Any) -> Any:
    if isinstance(value, dict) and _wants_optimizer(value):
        return build_scheduler(value, optimizer)
    if isinstance(value, dict):
        return {name: _scheduled(item, optimizer) for name, item in value.items()}
    return [_scheduled(item, optimizer) for item in value] if isinstance(value, list) else value


def _wants_optimizer(value: dict[str, Any]) -> bool:
    """Whether a value inside a scheduler's mapping is a scheduler itself."""
    try:
        parameters = list(inspect.signature(_find(value[TARGET])).parameters) if TARGET in value else []
    except (_NotFound, TypeError, ValueError):
        return False
    return parameters[:1] == ["optimizer"]


def build(target: Target, *args: Any, **kwargs: Any) -> Any:
    """Import what `_target_` names and call it, targets among its arguments first.

    With `_partial_: true` it is not called: the result is the thing itself with the given arguments bound, as a
    collate function wants to be.

    Raises:
        RecipeError: there is no such thing to call.
    """
    try:
        called = _find(target[TARGET])
    except _NotFound as error:
        raise RecipeError([Problem(place="", key=TARGET, message=str(error))]) from error
    given = {name: _built(value) for name, value in target.items() if name not in (TARGET, PARTIAL)}
    if target.get(PARTIAL):
        return functools.partial(called, *args, **{**given, **kwargs})
    return called(*args, **{**given, **kwargs})


def check_options(loaded: Loaded, options: type) -> list[Problem]:
    """What is wrong with the backend's options, for an adapter that had to be imported to know them."""
    problems: list[Problem] = []
    values = _read_options(loaded.recipe.backend, options, problems)

    def complain(key: Key, message: str) -> None:
        problems.append(Problem(place="", key=dotted(key), message=message))

    if not problems:
        check_rules(options, values, complain)
    return [Problem(place=loaded.place(p.key), key=p.key, message=p.message) for p in problems]


def make_options(loaded: Loaded | Backend, options: type) -> Any:
    """The backend's options as an instance of the adapter's dataclass.

    Raises:
        RecipeError: they are not what it takes.
    """
    problems: list[Problem] = []
    backend = loaded.recipe.backend if isinstance(loaded, Loaded) else loaded
    values = _read_options(backend, options, problems)
    if problems:
        raise RecipeError(problems)
    return rules.make(options, values)


def _read_options(backend: Backend, options: type, problems: list[Problem]) -> dict[str, Any]:
    reader = Reader(problems, {OPTIONS: options})
    return reader.read(tree_of(backend.options, ""), options, OPTIONS)


def _built(value: Any) -> Any:
    if isinstance(value, dict):
        return build(value) if TARGET in value else {name: _built(item) for name, item in value.items()}
    return [_built(item) for item in value] if isinstance(value, list) else value


def _complaints(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) for each target in a value."""
    if isinstance(value, dict) and TARGET in value:
        yield from _binding(value, key)
    for name, item in entries(value):
        yield from _complaints(item, f"{key}.{name}")


def _group_complaints(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Options of parameter groups that the optimizer does not take; torch would keep them without a word."""
    try:
        parameters = inspect.signature(_find(recipe.optimizer[TARGET])).parameters.values()
    except (_NotFound, TypeError, ValueError):
        return  # said of the optimizer itself, or not to be known
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters if p.kind in _NAMED][_PASSED["optimizer"] :]
    for index, group in enumerate(recipe.parameter_groups):
        for name in group.options:
            if name not in names:
                hint = did_you_mean(name, names) or f"; it takes {', '.join(names)}"
                key = f"parameter_groups.{index}.options.{name}"
                yield key, f"{recipe.optimizer[TARGET]} has no argument {name!r}{hint}"


def _binding(target: dict[str, Any], key: str) -> Iterator[tuple[str, str]]:
    """What keeps one target from being called with its arguments."""
    path = target[TARGET]
    try:
        called = _find(path)
        parameters = list(inspect.signature(called).parameters.values())
    except _NotFound as error:
        yield f"{key}.{TARGET}", str(error)
        return
    except (TypeError, ValueError):  # written in C, without a signature: only the call can tell
        return
    nested = key.startswith("scheduler.") and [p.name for p in parameters[:1]] == ["optimizer"]
    passed = [p for p in parameters if p.kind in _POSITIONAL][: 1 if nested else _PASSED.get(key, 0)]
    own = [p for p in parameters if p not in passed]
    names = [p.name for p in own if p.kind in _NAMED]
    free = any(p.kind is p.VAR_KEYWORD for p in own)
    meant: set[str | None] = set()
    for name in target:
        if name in [p.name for p in passed]:
            yield f"{key}.{name}", "is passed by the engine; leave it out"
        elif name not in (TARGET, PARTIAL, *names) and not free:
            hint = did_you_mean(name, names) or f"; it takes {', '.join(names) or 'none'}"
            yield f"{key}.{name}", f"{path} has no argument {name!r}{hint}"
            meant.add(nearest(name, names))
    partial = target.get(PARTIAL, False)
    if not isinstance(partial, bool):
        yield f"{key}.{PARTIAL}", f"{partial!r} is not true or false"
    for p in own if partial is not True else []:
        required = p.default is p.empty and p.kind in (*_NAMED, p.POSITIONAL_ONLY)
        if required and p.name not in target and p.name not in meant:
            yield key, f"{path} needs the argument {p.name!r}; expected {p.name}: VALUE in this mapping"


def _find(path: str) -> Any:
    """What a dotted path names, if it can be called.

    Raises:
        _NotFound: a part of it does not exist, cannot be imported, or is nothing to call.
    """
    first, *rest = path.split(".")
    found = _module(first, path, list(sys.modules))
    so_far = first
    for part in rest:
        outer, so_far = so_far, f"{so_far}.{part}"
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            found = _module(so_far, path, dir(found), outer)
        elif not hasattr(found, part):
            raise _NotFound(f"{path!r}: {outer!r} has no {part!r}{did_you_mean(part, dir(found))}")
        else:
            found = getattr(found, part)
    if not callable(found):
        kind = "a module" if isinstance(found, types.ModuleType) else f"{type(found).__name__} {found!r}"
        raise _NotFound(f"{path!r} is {kind}; expected a class or a function")
    return found


def _module(name: str, path: str, names: list[str], outer: str = "") -> Any:
    """Import a module on the way to `path`; `names` are what it might have been meant to be."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, outer):
            raise _NotFound(f"{path!r}: importing {name!r} fails, no module is named {error.name!r}") from error
        last = name.rpartition(".")[2]
        missing = f"{outer!r} has no {last!r}" if outer else f"no module is named {last!r}"
        where = "" if outer else " (modules of the working directory, or installed)"
        raise _NotFound(f"{path!r}: {missing}{did_you_mean(last, names)}{where}") from error
    except (Exception, SystemExit) as error:  # the module's own code may raise anything
        said = f"{type(error).__name__}: {error}"
        raise _NotFound(f"{path!r}: importing {name!r} fails with {said}") from error
