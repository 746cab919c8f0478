"""What a recipe needs on each backend and number of ranks, what fits, and how long a step takes: nothing is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardkit.communication import Traffic
from shardkit.engines import registry
from shardkit.engines.checks import check_backend
from shardkit.engines.footprint import Footprint, Trace
from shardkit.engines.meaning import Situation, meaning_of
from shardkit.engines.start import check_parameters
from shardkit.engines.swapped import with_backend, words
from shardkit.errors import BackendError, RecipeError, RequestError
from shardkit.planning import ladder
from shardkit.planning.device import Device
from shardkit.planning.duration import Duration, duration
from shardkit.planning.ladder import Choice
from shardkit.planning.model import PlannedModel, PlannedWorkload
from shardkit.planning.why import why
from shardkit.recipe.build import check_options, make_options
from shardkit.recipe.load import Loaded

BLOCKS = "blocks"
NOTHING = Trace(events=(), inputs=0, flops=0)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan is asked for."""

    device: Device
    world_sizes: tuple[int, ...]
    nodes: int | None = None
    # Over which the ranks lie; None = as few as hold them.
    backends: tuple[str, ...] = ()
    # Empty = those of the ladder.
    ratios: Mapping[str, float] = field(default_factory=dict)
    # Name of a choice -> measured over predicted peak, from earlier measurements of this model.
    shared_memory: int | None = None
    # Bytes that the ranks of a node share, where devices have no memory of their own; None = each its device's.

    def over_nodes(self, world_size: int) -> int:
        """Nodes that so many ranks lie on."""
        return self.nodes or -(-world_size // self.device.devices_per_node)

    def device_of(self, world_size: int) -> Device:
        """What each of so many ranks has."""
        if self.shared_memory is None:
            return self.device
        return self.device.with_memory(self.shared_memory // -(-world_size // self.over_nodes(world_size)))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One choice, planned; bytes are those of its fullest rank."""

    choice: Choice
    overrides: tuple[str, ...] = ()
    # What runs it, as words of a command line after those that the plan was made with.
    rung: int = ladder.LAST
    # How far up the ladder of cost.
    refused: str = ""
    # Why the backend does not run this recipe; what follows is empty then.
    unknown: str = ""
    # Why activations, and with them the peak, are not known.
    note: str = ""
    # What else one has to know, as that the global batch has to change.
    memory: int = 0
    # Bytes of the device of a rank.
    footprint: Footprint | None = None
    ratio: float = 1.0
    # The predicted peak is multiplied by it.
    needs: int | None = None
    # Bytes a device has to have: the peak, the margin, and what no tensor gets.
    fits: bool | None = None
    # None = not known.
    largest_micro_batch_size: int | None = None
    # That fits, of those that divide the global batch over the ranks; 0 = none does, None = not known.
    communication: Traffic | None = None
    # Of a step.
    duration: Duration | None = None
    micro_batch_size: int = 1
    accumulation: int = 1

    @property
    def peak(self) -> int | None:
        """Bytes at the most, as measurements correct it; None = not known."""
        return None if self.footprint is None or self.unknown else math.ceil(self.footprint.peak * self.ratio)

    @property
    def cost(self) -> tuple[Any, ...]:
        """What comes first is cheaper: fewer ranks, a lower rung, a faster step, no further library."""
        seconds = self.duration.seconds if self.duration else math.inf
        return self.choice.world_size, self.rung, seconds, self.choice.name


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All choices of a recipe, for one kind of device."""

    loaded: Loaded
    device: Device
    parameters: int
    # Of the model.
    built_on: str
    rows: tuple[Row, ...]
    # By number of ranks, then the cheapest first.
    recommended: Row | None
    # The cheapest that fits; None = none does, or no peak is known.
    runner_up: Row | None
    # The next that fits.


def plan(loaded: Loaded, wanted: Wanted, models: Models | None = None) -> Plan:
    """Plan a recipe on every backend and number of ranks that is wanted.

    Args:
        loaded: the recipe.
        wanted: what it is planned on.
        models: those of an earlier plan of the recipe, whose traces need not be made again.

    Raises:
        RequestError: the model cannot be built, or a backend is not known.
    """
    models = models or Models(loaded, wanted.device.kind)
    rows = [row for size in wanted.world_sizes for row in _all_rows(models, wanted, size)]
    rows.sort(key=lambda row: row.cost)
    fitting = [row for row in rows if row.fits]
    recomputes = bool(fitting) and fitting[0].choice.activation_checkpointing is not None
    # Recomputing what fits as it is only costs.
    others = [row for row in fitting[1:] if recomputes or row.choice.activation_checkpointing is None]
    bare = models.of(None)
    return Plan(
        loaded=loaded,
        device=wanted.device,
        parameters=sum(weight.numel for weight in bare.anatomy.weights),
        built_on=bare.bare.built_on,
        rows=tuple(rows),
        recommended=fitting[0] if fitting else None,
        runner_up=others[0] if others else None,
    )


class Models:
    """The recipe's model as it is and with its blocks recomputed, each made once."""

    def __init__(self, loaded: Loaded, device: str) -> None:
        self.loaded, self._device = loaded, device
        self._made: dict[str | int | None, PlannedModel] = {}

    def of(self, activation_checkpointing: str | int | None) -> PlannedModel:
        if activation_checkpointing not in self._made:
            self._made[activation_checkpointing] = PlannedModel(
                self.loaded,
                device=self._device,
                activation_checkpointing=activation_checkpointing,
                beside=next(iter(self._made.values()), None),
            )
        return self._made[activation_checkpointing]

    @property
    def joined(self) -> bool:
        """Whether a window is one forward, as under policy exact."""
        try:
            return self.of(None).joined
        except RequestError:
            return False

    @property
    def recomputable(self) -> bool:
        """Whether blocks can be recomputed that are not yet."""
        if self.loaded.recipe.activation_checkpointing != "none":
            return False
        try:
            return bool(self.of(BLOCKS).units)
        except RequestError:
            return False


def _all_rows(models: Models, wanted: Wanted, world_size: int) -> list[Row]:
    """The rows of a number of ranks; with what helps a smaller micro-batch only where no other way fits."""
    rows = list(_rows(models, wanted, world_size))
    if not any(row.fits or row.largest_micro_batch_size for row in rows):
        rows += _rows(models, wanted, world_size, cut=True)
    return rows


def _rows(models: Models, wanted: Wanted, world_size: int, *, cut: bool = False) -> Iterator[Row]:
    """The rows of a number of ranks.

    Args:
        models: of the recipe.
        wanted: what it is planned on.
        world_size: the number of ranks.
        cut: instead, those that are of use only where the recipe's micro-batch is cut.
    """
    nodes = wanted.over_nodes(world_size)
    for name in wanted.backends or ladder.backends():
        try:
            loaded = with_backend(models.loaded, name, where_known=True)
            adapter = registry.load(loaded.recipe.backend.adapter)
            options = make_options(loaded.recipe.backend, adapter.Options)
        except RequestError as error:
            if not cut:
                yield Row(choice=Choice(backend=name, world_size=world_size), refused=str(error))
            continue
        traits = adapter.describe(options)
        if traits.max_world_size is not None and world_size > traits.max_world_size and not wanted.backends:
            continue
        accumulation = 1 if models.joined else _accumulation(loaded, world_size)[0]
        choices = list(ladder.variants(name, options, world_size, nodes, accumulation))
        if cut:
            whole = models.joined or loaded.recipe.batch.micro_batch_size == 1
            divided = [] if whole else ladder.variants(name, options, world_size, nodes, accumulation + 1)
            choices = [choice for choice in divided if choice not in choices]
        if models.recomputable:
            choices += [replace(choice, activation_checkpointing=BLOCKS) for choice in choices]
        named = words(models.loaded, name)
        for choice in choices:
            yield replace(_row(models, wanted, loaded, choice, nodes), overrides=choice.words(named))


def _row(models: Models, wanted: Wanted, loaded: Loaded, choice: Choice, nodes: int) -> Row:
    loaded = _with_options(loaded, choice)
    recipe, backend = loaded.recipe, loaded.recipe.backend
    adapter = registry.load(backend.adapter)
    problems = check_options(loaded, adapter.Options) or check_backend(loaded, wanted.device.kind, choice.world_size)
    if problems:
        return Row(choice=choice, refused=problems[0].message)
    try:
        model = models.of(choice.activation_checkpointing)
    except RecipeError:
        raise
    except RequestError as error:
        return Row(choice=choice, refused=str(error))
    options = make_options(backend, adapter.Options)
    traits = adapter.describe(options)
    device = wanted.device_of(choice.world_size)
    if traits.shards:
        try:
            check_parameters(model.bare.model)
        except BackendError as error:
            return Row(choice=choice, refused=str(error), memory=device.memory)
    accumulation, note = _accumulation(loaded, choice.world_size)
    row = Row(
        choice=choice,
        memory=device.memory,
        rung=ladder.rung(traits, options, recomputes=choice.activation_checkpointing is not None),
        note=note,
        ratio=wanted.ratios.get(choice.name, 1.0),
        micro_batch_size=recipe.batch.micro_batch_size,
        accumulation=accumulation,
    )
    candidate = _Candidate(adapter, options, model, choice.world_size, recipe.batch.micro_batch_size * accumulation)
    workload = model.workload(recipe.batch.micro_batch_size, accumulation)
    try:
        flops = workload.trace(candidate.situation(workload.micro_batch_size).stored).flops
        unknown = ""
    except Exception as error:  # whatever a model, its data or its loss raise on fake tensors
        flops, unknown = 0, why(error)
        workload = _Untraced(model=model, micro_batch_size=workload.micro_batch_size)
    try:
        footprint = candidate.footprint(workload)
    except Exception as error:  # whatever an optimizer of the user's raises that looks at its numbers
        return replace(row, unknown=f"the optimizer cannot be tried: {why(error)}")
    if footprint is None:
        return replace(row, unknown=f"the adapter {backend.adapter!r} does not say what it needs")
    situation = candidate.situation(workload.micro_batch_size)
    traffic = meaning_of(adapter, options, situation).traffic
    row = replace(row, unknown=unknown, footprint=footprint, communication=traffic)
    if unknown:
        # Where not even what is known fits, nothing else has to be.
        least = needed(device, footprint.parameters + footprint.masters + footprint.optimizer + footprint.buffers)
        return replace(row, fits=False, needs=least) if least > device.memory else row
    took = duration(
        device,
        flops=flops * situation.accumulation,
        precision=_computed(recipe.train.precision),
        footprint=footprint,
        traffic=traffic,
        world_size=choice.world_size,
        nodes=nodes,
        accumulation=situation.accumulation,
    )
    needs = needed(device, most(footprint, row.ratio))
    return replace(
        row,
        duration=took,
        needs=needs,
        fits=needs <= device.memory,
        largest_micro_batch_size=candidate.largest(device, row.ratio),
    )


def needed(device: Device, peak: float) -> int:
    """Bytes of memory a device has to have for a predicted peak."""
    return math.ceil(peak * (1 + device.margin)) + device.reserved


def most(footprint: Footprint, ratio: float) -> float:
    """Bytes at the most: in a step, as measurements correct it by `ratio`, or before the first."""
    return max(footprint.peak * ratio, footprint.loading)


class _Candidate:
    """One backend with its options, at any micro-batch size."""

    def __init__(self, adapter: Any, options: Any, model: PlannedModel, world_size: int, items: int) -> None:
        self._adapter, self._options, self._model = adapter, options, model
        self._world_size, self._items = world_size, items
        # Items of a rank in a window.

    def situation(self, micro_batch_size: int) -> Situation:
        recipe = self._model.recipe
        return Situation(
            anatomy=self._model.anatomy,
            world_size=self._world_size,
            # Under exact a window is one forward.
            accumulation=1 if self._model.joined else self._items // micro_batch_size,
            precision=recipe.train.precision,
            max_grad_norm=recipe.train.max_grad_norm,
            micro_batch_size=micro_batch_size,
        )

    def footprint(self, workload: Any) -> Footprint | None:
        found = self._adapter.footprint(self._options, self.situation(workload.micro_batch_size), workload)
        if found is None:
            return None
        if self._model.device == "cpu":
            # What waits in host memory waits in the device's own.
            return replace(found, peak=found.peak + found.host)
        return replace(found, host_loading=self._model.built)

    def largest(self, device: Device, ratio: float) -> int | None:
        """The largest micro-batch that fits, of those that divide the items of a rank; traced anew at the end."""
        sizes = [size for size in range(1, self._items + 1) if self._items % size == 0]
        own = self._model.recipe.batch.micro_batch_size
        try:
            other = own * 2 if own == 1 or own * 2 in sizes else max(1, own // 2)
            between = (min(own, other), max(own, other))
            # One micro-step needs no place for gradients of others, so it may fit where a smaller one does not.
            if self._fits(device, ratio, sizes[-1], between) and self._fits(device, ratio, sizes[-1], None):
                return sizes[-1]
            low, high = 0, len(sizes) - 1
            # Sizes before `low` fit, those from `high` on do not.
            while low < high:
                middle = (low + high) // 2
                if self._fits(device, ratio, sizes[middle], between):
                    low = middle + 1
                else:
                    high = middle
            while low and not self._fits(device, ratio, sizes[low - 1], None):
                low -= 1
        except Exception:  # a model that takes no other batch
            return None
        return sizes[low - 1] if low else 0

    def _fits(self, device: Device, ratio: float, size: int, between: tuple[int, int] | None) -> bool:
        accumulation = self._items // size
        workload = self._model.workload(size, accumulation)
        if between is not None and size not in between:
            workload = replace(workload, between=between)
        footprint = self.footprint(workload)
        return footprint is not None and needed(device, most(footprint, ratio)) <= device.memory


class _Untraced(PlannedWorkload):
    """What is known without a trace."""

    def trace(self, stored: Any) -> Trace:
        return NOTHING


def _accumulation(loaded: Loaded, world_size: int) -> tuple[int, str]:
    """Micro-steps of a window, and what has to change so that it is a whole number of them."""
    problems = list(loaded.recipe.check_world(world_size))
    batch = loaded.recipe.batch
    accumulation = max(1, round(batch.global_batch_size / (batch.micro_batch_size * world_size)))
    if not problems:
        return accumulation, ""
    total = accumulation * batch.micro_batch_size * world_size
    return accumulation, f"planned with batch.global_batch_size={total}, a whole number of micro-steps on all ranks"


def _with_options(loaded: Loaded, choice: Choice) -> Loaded:
    recipe = loaded.recipe
    backend = replace(recipe.backend, options={**recipe.backend.options, **choice.options})
    changed = replace(recipe, backend=backend)
    if choice.activation_checkpointing is not None:
        changed = replace(changed, activation_checkpointing=choice.activation_checkpointing)
    return Loaded(changed, loaded.origins, loaded.path)


def _computed(precision: str) -> str:
    """Of matrix products."""
    return precision.partition("-")[0]


__all__ = ["Choice", "Plan", "Row", "Wanted", "needed", "plan"]
