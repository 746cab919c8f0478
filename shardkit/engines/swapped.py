"""The same recipe on another backend."""

from __future__ import annotations

import re
from dataclasses import fields, replace

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
    own = loaded.recipe.backend
    if name == own.name:
        return loaded
    backend = load_backend(name, options_of=registry.options_of)
    options = registry.options_of(backend.adapter) if where_known else None
    known = {each.name for each in fields(options)} if options else own.options.keys()
    asked = {
        key: value
        for key, value in own.options.items()
        if key in known and _ASKED.match(loaded.origins.get(_OPTIONS + key, DEFAULT))
    }
    origins = {key: place for key, place in loaded.origins.items() if key.partition(".")[0] != "backend"}
    file = shipped.shown("backends", name) if name in shipped.files("backends") else f"backend {name}"
    origins |= {"backend": file, "backend.name": file, "backend.adapter": file}
    origins |= {_OPTIONS + key: file for key in backend.options}
    origins |= {_OPTIONS + key: loaded.origins[_OPTIONS + key] for key in asked}
    backend = replace(backend, options={**backend.options, **asked})
    return Loaded(replace(loaded.recipe, backend=backend), origins, loaded.path)
