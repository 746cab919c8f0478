"""The same recipe on another backend."""

from __future__ import annotations

from dataclasses import replace

from shardkit import shipped
from shardkit.engines import registry
from shardkit.recipe.backend import load_backend
from shardkit.recipe.load import DEFAULT, Loaded

_OPTIONS = "backend.options."


def with_backend(loaded: Loaded, name: str) -> Loaded:
    """The same recipe on another backend, with the options that the command line gives.

    Raises:
        RecipeError: there is no such backend.
    """
    own = loaded.recipe.backend
    if name == own.name:
        return loaded
    backend = load_backend(name, options_of=registry.options_of)
    asked = {
        key: value
        for key, value in own.options.items()
        if loaded.origins.get(_OPTIONS + key, DEFAULT).startswith("command line")
    }
    origins = {key: place for key, place in loaded.origins.items() if key.partition(".")[0] != "backend"}
    file = shipped.shown("backends", name) if name in shipped.files("backends") else f"backend {name}"
    origins |= {"backend": file, "backend.name": file, "backend.adapter": file}
    origins |= {_OPTIONS + key: file for key in backend.options}
    origins |= {_OPTIONS + key: loaded.origins[_OPTIONS + key] for key in asked}
    backend = replace(backend, options={**backend.options, **asked})
    return Loaded(replace(loaded.recipe, backend=backend), origins, loaded.path)
