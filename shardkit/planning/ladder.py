"""The order of cost in which a plan tries backends: no more sharding than needed.

Rungs: one process; replicas; the optimizer's state sharded; gradients too, or all of it with parameters that stay
gathered in a micro-step; all of it (also within groups of ranks, hybrid); last, recomputed activations and states in
host memory, of which the faster comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shardkit import shipped
from shardkit.engines import registry
from shardkit.engines.api import Traits
from shardkit.engines.swapped import option_words, written
from shardkit.recipe.backend import load_backend

SINGLE, REPLICAS, OPTIMIZER, GRADIENTS, ALL, LAST = range(6)
RUNG = {
    frozenset(): REPLICAS,
    frozenset({"optimizer"}): OPTIMIZER,
    frozenset({"optimizer", "gradients"}): GRADIENTS,
}
KEPT = "reshard_after_forward"
# The option of parameters that are freed between their uses,
REDUCED = "reduce_each_micro_step"
# and of gradients that a window's micro-steps leave as shards.


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way to run a recipe: settings over it."""

    backend: str
    world_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    # Over the backend's preset.
    activation_checkpointing: str | int | None = None
    # None = the recipe's own.

    @property
    def name(self) -> str:
        """What it is without the number of ranks: "fsdp2, reshard_after_forward=false"."""
        more = [f"{key}={written(value)}" for key, value in self.options.items()]
        if self.activation_checkpointing is not None:
            more.append(f"activation_checkpointing={self.activation_checkpointing}")
        return ", ".join([self.backend, *more])

    def words(self, backend: Iterable[str]) -> tuple[str, ...]:
        """As words of a command line, after those that name its backend."""
        again = self.activation_checkpointing
        recomputed = () if again is None else (f"activation_checkpointing={again}",)
        return (*backend, *option_words(self.options), *recomputed)


def rung(traits: Traits, options: Any, *, recomputes: bool) -> int:
    """Where a backend is on the ladder."""
    if recomputes or traits.offloads:
        return LAST
    if traits.max_world_size == 1:
        return SINGLE
    if getattr(options, KEPT, True) is False:
        return GRADIENTS
    return RUNG.get(traits.shards, ALL)


def backends() -> list[str]:
    """Presets that need no library beside the one that shards: what goes through another needs as much memory."""
    found = []
    for name in shipped.files("backends"):
        registration = registry.BUILT_IN.get(load_backend(name, options_of=registry.options_of).adapter)
        if registration is None or not registration.through:
            found.append(name)
    return found


def variants(backend: str, options: Any, world_size: int, nodes: int, accumulation: int) -> Iterator[Choice]:
    """The ways to run one backend that a plan looks at, from its preset on."""
    known = {each.name for each in fields(options)}
    if "replicas" in known and options.replicas > 1:
        # Copies lie on nodes, shards within.
        copies = nodes if nodes > 1 and world_size % nodes == 0 else options.replicas
        if 1 < copies < world_size and world_size % copies == 0:
            more = {"replicas": copies} if copies != options.replicas else {}
            yield Choice(backend=backend, world_size=world_size, options=more)
        return
    # The preset's way and the others.
    ways: list[dict[str, Any]] = [{}]
    if world_size > 1 and KEPT in known and not getattr(options, "cpu_offload", False):
        ways = [{KEPT: not getattr(options, KEPT)}, *ways]
    if world_size > 1 and accumulation > 1 and getattr(options, REDUCED, None) is False:
        ways += [{**way, REDUCED: True} for way in ways]
    for way in ways:
        yield Choice(backend=backend, world_size=world_size, options=way)
