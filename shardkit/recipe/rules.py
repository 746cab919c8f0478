"""Makes the schema's dataclasses from read values, and asks each what does not fit together in it.

A value with a problem has no say: a rule that looks at it stops there, and all other rules are still asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from omegaconf import MISSING

from shardkit.recipe.tree import Key

Complain = Callable[[Key, str], None]


class _Unsound(Exception):
    """A rule looked at a value that has a problem already."""


def make(schema: type, values: dict[str, Any]) -> Any:
    """An instance of a section, and of those inside; broken fields cannot be read from it."""
    hints = get_type_hints(schema)
    made = {name: _value(hints[name], value) for name, value in values.items()}
    broken = {name for name, value in made.items() if is_broken(value)}
    return (_guarded(schema, broken) if broken else schema)(**made)


def check(section: Any, complain: Complain, key: Key = ()) -> None:
    """Ask a section, and those inside, for its complaints."""
    for name, value in vars(section).items():
        for index, item in enumerate(value) if isinstance(value, list) else ((None, value),):
            if dataclasses.is_dataclass(item):
                check(item, complain, (*key, name) if index is None else (*key, name, index))
    try:
        for inner, message in section.check() if hasattr(section, "check") else ():
            complain((*key, *inner.split(".")) if inner else key, message)
    except _Unsound:
        return


def is_broken(value: Any) -> bool:
    """A value, or one inside it, has a problem."""
    if isinstance(value, dict):
        return any(is_broken(item) for item in value.values())
    if isinstance(value, list):
        return any(is_broken(item) for item in value)
    return isinstance(value, str) and value == MISSING


def _value(hint: Any, value: Any) -> Any:
    schemas = [part for part in (hint, *get_args(hint)) if isinstance(part, type) and dataclasses.is_dataclass(part)]
    if schemas and isinstance(value, dict):
        return make(schemas[0], value)
    if schemas and isinstance(value, list):
        return [make(schemas[0], item) if isinstance(item, dict) else item for item in value]
    return value


def _guarded(schema: type, broken: set[str]) -> type:
    class Guarded(schema):
        def __getattribute__(self, name: str) -> Any:
            if name in broken:
                raise _Unsound
            return super().__getattribute__(name)

    return Guarded
