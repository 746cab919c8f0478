"""The same recipe on another backend."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from shardkit import shipped
from shardkit.engines import registry
from shardkit.recipe.backend import load_backend
from shardkit.recipe.load import DEFAULT, Loaded

_OPTIONS = "backend.options."
_ASKED = re.compile(r"""command line ['"]\s*backend\.options\b""")
# An option that names no backend; one in `backend={adapter: ...}` is that adapter's.


def with_backend(loaded: Loaded, name: str, *, where_known: bool = False) -> Loaded:
    """The same recipe on another backend, with the options that the command line gives to any.

    Args:
        loaded: the recipe.
        name: of the backend.
        where_known: leave out those that the backend does not have, which are refused later otherwise.

    Raises:
        RecipeError: there is no such backend.
    """
    if name == loaded.recipe.backend.name:
        return loaded
    backend = load_backend(name, options_of=registry.options_of)
    asked = _asked(loaded, backend.adapter if where_known else None)
    origins = {key: place for key, place in loaded.origins.items() if key.partition(".")[0] != "backend"}
    file = shipped.shown("backends", name) if name in shipped.files("backends") else f"backend {name}"
    origins |= {"backend": file, "backend.name": file, "backend.adapter": file}
    origins |= {_OPTIONS + key: file for key in backend.options}
    origins |= {_OPTIONS + key: loaded.origins[_OPTIONS + key] for key in asked}
    backend = replace(backend, options={**backend.options, **asked})
    return Loaded(replace(loaded.recipe, backend=backend), origins, loaded.path)


def words(loaded: Loaded, name: str) -> list[str]:
    """What, after the words that a recipe was loaded with, puts it on a backend with the options that it knows.

    Raises:
        RecipeError: there is no such backend.
    """
    if name == loaded.recipe.backend.name:
        return []
    asked = _asked(loaded, load_backend(name, options_of=registry.options_of).adapter)
    return [f"backend={name}", *option_words(asked)]


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options of a backend, as words of a command line."""
    return [f"{_OPTIONS}{key}={written(value)}" for key, value in options.items()]


def written(value: Any) -> str:
    """A value as it stands in a recipe; JSON is YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _asked(loaded: Loaded, adapter: str | None) -> dict[str, Any]:
    """The options that the command line gives; only those that the adapter has, where one is named."""
    given = loaded.recipe.backend.options
    options = registry.options_of(adapter) if adapter else None
    known = {each.name for each in fields(options)} if options else given.keys()
    return {
        key: value
        for key, value in given.items()
        if key in known and _ASKED.match(loaded.origins.get(_OPTIONS + key, DEFAULT))
    }
