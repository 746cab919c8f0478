"""What the schema asks for, in words."""

from __future__ import annotations

import dataclasses
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from shardkit.recipe.schema import TARGET, Recipe
from shardkit.recipe.suggest import did_you_mean

_NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}


def is_required(field: dataclasses.Field[Any]) -> bool:
    """A recipe has to give it."""
    return field.default_factory is dataclasses.MISSING and field.default in (dataclasses.MISSING, MISSING)


def describe(hint: Any) -> str:
    """What a type asks for, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"a mapping with {TARGET}"
    if origin is Literal:
        names = ", ".join(map(str, arguments))
        return f"one of {names}" if "," in names else names
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is list:
        inner = arguments[0] if arguments else Any
        return "a list of mappings" if dataclasses.is_dataclass(inner) else f"a list of {describe(inner)}"
    if dataclasses.is_dataclass(hint):
        required = [field.name for field in dataclasses.fields(hint) if is_required(field)]
        names = required or [field.name for field in dataclasses.fields(hint)]
        return getattr(hint, "EXPECTED", f"a section with {', '.join(names)}")
    return _NAMES.get(hint, "a mapping" if origin is dict else "a value")


def takes_null(hint: Any) -> bool:
    """Null is one of the values of this type."""
    return type(None) in get_args(hint)


def unknown(name: str, fields: list[str]) -> str:
    """What to say about a key that a section does not have."""
    if near := did_you_mean(name, fields):
        return f"unknown key{near}"
    elsewhere = [path for path in _every_key(Recipe) if path.split(".")[-1] == name or path == name]
    if elsewhere and "." in name:
        return f"unknown key; write {name.split('.')[-1]!r} inside the section {name.rpartition('.')[0]!r}"
    if elsewhere:
        return f"unknown key here; did you mean {' or '.join(elsewhere)}?"
    return f"unknown key; expected {', '.join(fields) or 'none'}"


def _every_key(schema: type, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, hint in get_type_hints(schema, include_extras=True).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            keys += _every_key(hint, f"{prefix}{name}.")
        elif name != "EXPECTED":
            keys.append(prefix + name)
    return keys
