"""The layers under a recipe: the file of its launch profile and the preset of its backend."""

from __future__ import annotations

from pathlib import Path

from omegaconf import MISSING

from shardkit import shipped
from shardkit.errors import Problem
from shardkit.recipe import backend
from shardkit.recipe.fields import Reader
from shardkit.recipe.interpolation import resolve
from shardkit.recipe.positions import read_document
from shardkit.recipe.schema import Launch
from shardkit.recipe.tree import Items, Leaf, Section, Tree, tree_of


class Layers:
    """Fills a recipe's tree from the files it names."""

    def __init__(self, root: Section, folder: Path, problems: list[Problem]) -> None:
        self.root = root
        self.folder = folder
        # The recipe's, where a backend's path may start.
        self.problems = problems

    def expand_backend(self) -> None:
        """Replace the backend's name or path by what its file says."""
        self._settled("backend")
        self._settled("backend", "adapter")
        backend.expand(self.root, self.folder, self.problems)

    def underlay_profile(self) -> None:
        """Give the launch section the defaults of its profile's file."""
        launch = self.root.children.get("launch")
        if isinstance(launch, Items) or (isinstance(launch, Leaf) and not launch.empty):
            return
        named = self._settled("launch", "profile")
        profile = str(named.value) if isinstance(named, Leaf) else Launch.profile
        path = shipped.files("launch").get(profile)
        if path is None:
            return
        defaults = read_document(path, shipped.shown("launch", profile), self.problems)
        given = launch.children if isinstance(launch, Section) else {}
        place = launch.place if launch else defaults.place
        self.root.children["launch"] = Section(place, {**defaults.children, **given})

    def _settled(self, *key: str) -> Tree | None:
        """What stands at a key, its interpolation resolved in the recipe as it is so far."""
        holder, tree = self.root, self.root.children.get(key[0])
        for part in key[1:]:
            if not isinstance(tree, Section):
                return None
            holder, tree = tree, tree.children.get(part)
        if isinstance(tree, Leaf) and tree.refers:
            reader = Reader([])
            value = reader.read(self.root, dict)
            resolve(value, reader)
            for part in key:
                value = value[part]
            if value != MISSING:  # else it is a problem of the recipe, and told with the others
                tree = holder.children[key[-1]] = tree_of(value, tree.place)
        return tree
