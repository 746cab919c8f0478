"""What ZeRO 3 gathers and frees, and when: the plan that DeepSpeed makes once it has seen one forward and backward.

The rules are those of DeepSpeed 0.19.8 (PartitionedParameterCoordinator in
runtime/zero/partitioned_param_coordinator.py), in elements: a module's own parameters are gathered when it is entered,
more are gathered ahead, and they are freed when it is left unless they are used again soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Literal, NamedTuple

from shardkit.engines.anatomy import Anatomy, Layer
from shardkit.engines.options import DeepSpeedOptions


class Use(NamedTuple):
    """A module begins or ends its forward or its backward; a forward after the first backward is a recomputation."""

    what: Literal["forward", "forward_end", "backward", "backward_end"]
    path: str

    @property
    def begins(self) -> bool:
        return not self.what.endswith("_end")


class Gathered(NamedTuple):
    """Full names of the parameters that are gathered as a module begins."""

    own: list[str]
    # Its own, which it waits for.
    ahead: list[str]
    # Of modules to come.


class Coordinator:
    """Goes through micro-steps, one `Use` after the other."""

    def __init__(self, uses: Iterable[Use], anatomy: Anatomy, options: DeepSpeedOptions, accumulation: int) -> None:
        """Make the plan.

        Args:
            uses: of a micro-step.
            anatomy: of the model.
            options: resolved.
            accumulation: micro-steps of a window.
        """
        uses = list(uses)
        self._own = {layer.path: layer.weights for layer in anatomy.layers}
        self._numel = {weight.name: weight.numel for weight in anatomy.weights}
        self._frozen = {weight.name for weight in anatomy.weights if not weight.trainable}
        least = options.stage3_param_persistence_threshold or 0
        self.stay = frozenset(name for name, numel in self._numel.items() if numel <= least)
        self._order = [self._own[use.path] for use in uses if use.begins]
        self._ahead = options.stage3_prefetch_bucket_size or 0
        self._most = options.stage3_max_live_parameters or 0
        self._distance = options.stage3_max_reuse_distance or 0
        self._freed: dict[tuple[str, int], set[str]] = {}
        self.begin()
        if accumulation > 1:
            # What is freed is decided once, in the second micro-step. When no step was made before it, not even the
            # parameters that stay are there.
            self.whole = set()
            for use in uses:
                self.come(use)
            self.begin()

    def begin(self) -> None:
        """A micro-step begins, in which what stays is there."""
        self.whole = set(self.stay)
        self._queue = deque((step, name) for step, names in enumerate(self._order) for name in names)
        self._planned: dict[str, int] = {}
        # The last step for which gathering ahead has seen to a parameter.
        self._users: dict[str, set[str]] = {name: set() for name in self._numel}
        self._lent: dict[str, list[str]] = {}
        # Frozen parameters, by the module whose backward frees them: the last begun when they were recomputed with.
        self._latest: str | None = None
        self._step = self._live = 0

    def come(self, use: Use) -> Gathered:
        """Go one on; what is gathered."""
        if not use.begins:
            self._leave(use)
            return Gathered([], [])
        if use.what == "backward":
            self._latest = use.path
        names = self._own[use.path]
        own = self._gather(names)
        for name in names:
            self._users[name].add(use.path)
            if use.what == "forward" and self._latest is not None and name in self._frozen:
                self._lent.setdefault(self._latest, []).append(name)
                self._users[name].add(self._latest)
        for _ in range(len({name for name in names if self._planned.get(name, -1) < self._step})):
            step, name = self._queue.popleft()
            self._planned[name] = step
        ahead: list[str] = []
        room, taken = min(self._most - self._live, self._ahead), 0
        while self._queue and taken < room:
            step, name = self._queue.popleft()
            self._planned[name] = max(self._planned.get(name, -1), step)
            if name not in self.whole and name not in ahead:
                ahead.append(name)
                taken += self._numel[name]
        self._gather(ahead)
        self._step += 1
        return Gathered(own, ahead)

    def _leave(self, use: Use) -> None:
        lent = self._lent.pop(use.path, []) if use.what == "backward_end" else []
        free = self._to_free(use.path) | (set(lent) - self.stay)
        for name in (*self._own[use.path], *lent):
            self._users[name].discard(use.path)
            if name in free and name in self.whole and not self._users[name]:
                self.whole.discard(name)
                self._live -= self._numel[name]

    def _to_free(self, path: str) -> set[str]:
        key = path, self._step
        if key not in self._freed:
            names = set(self._own[path]) - self.stay
            names = {name for name in names if self._planned.get(name, -1) <= self._step}
            passed = 0
            for coming in self._order[self._step :]:
                if passed >= self._distance:
                    break
                names.difference_update(coming)
                passed += sum(self._numel[name] for name in coming)
            self._freed[key] = names
        return self._freed[key]

    def _gather(self, names: Iterable[str]) -> list[str]:
        found = [name for name in names if name not in self.whole]
        self.whole.update(found)
        self._live += sum(self._numel[name] for name in found)
        return found


def gathered_elements(anatomy: Anatomy, options: DeepSpeedOptions, accumulation: int, parts: int) -> int:
    """Elements that a micro-step gathers, each parameter padded to a multiple of `parts` ranks.

    Args:
        anatomy: of the model, whose modules are taken to be called once each in its own order.
        options: resolved.
        accumulation: micro-steps of a window.
        parts: ranks.
    """
    uses = list(_micro_step(anatomy))
    coordinator = Coordinator(uses, anatomy, options, accumulation)
    sizes = {weight.name: -(-weight.numel // parts) * parts for weight in anatomy.weights}
    return sum(sizes[name] for use in uses for names in coordinator.come(use) for name in names)


def _micro_step(anatomy: Anatomy) -> Iterator[Use]:
    """The modules of a model as they begin and end."""
    trained = {weight.name for weight in anatomy.trainable}
    inner: dict[str, list[Layer]] = {layer.path: [] for layer in anatomy.layers}
    for layer in anatomy.layers[1:]:
        inner[_around(layer.path, inner)].append(layer)
    needed: set[str] = set()
    # Paths of modules with an output that needs a gradient: something up to there is trained.

    def forward(layer: Layer) -> Iterator[Use]:
        yield Use("forward", layer.path)
        for each in inner[layer.path]:
            yield from forward(each)
        if needed or not trained.isdisjoint(layer.weights):
            needed.add(layer.path)
        yield Use("forward_end", layer.path)

    def backward(layer: Layer) -> Iterator[Use]:
        if layer.path not in needed:
            return
        yield Use("backward", layer.path)
        for each in reversed(inner[layer.path]):
            yield from recomputed(each) if each.recomputed else backward(each)
        yield Use("backward_end", layer.path)

    def recomputed(layer: Layer) -> Iterator[Use]:
        """The backward of a block, which recomputes it as soon as what its last module has kept is asked for."""
        uses = list(backward(layer))
        first = list(takewhile(lambda use: use.begins, uses))
        yield from first
        second = [use for each in inner[layer.path] for use in forward(each)]
        while second and not second[-1].begins:
            # It ends with the last operator that kept something.
            second.pop()
        yield from second
        yield from uses[len(first) :]

    root = anatomy.layers[0]
    yield from forward(root)
    yield from backward(root)


def _around(path: str, paths: Mapping[str, object]) -> str:
    """The innermost module that holds this one and is called itself."""
    while path:
        path = path.rpartition(".")[0]
        if path in paths:
            return path
    return ""
