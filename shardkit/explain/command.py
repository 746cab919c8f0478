"""`shardkit explain`: from a command line to the table or the JSON."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.engines import registry
from shardkit.explain.explain import explain
from shardkit.explain.explanation import Explanation
from shardkit.recipe.here import import_from_here
from shardkit.recipe.load import load


def explained(
    recipe: str, overrides: Sequence[str], backends: Sequence[str], world_size: int | None
) -> list[Explanation]:
    """The meaning of a recipe on `backends`, or on its own when there are none.

    Raises:
        RequestError: the recipe is wrong whatever the backend, or there is no such backend.
    """
    import_from_here()
    loaded = load(recipe, overrides, options_of=registry.options_of)
    return explain(loaded, backends or [loaded.recipe.backend.name], world_size)
