"""Restore: read into a live engine what fits it, after everything that can be known beforehand was checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shardkit.checkpoint.agreement import agreed
from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.manifest import Entry, Key, Manifest
from shardkit.checkpoint.save import class_name
from shardkit.checkpoint.source import Source
from shardkit.checkpoint.tensors import DTYPES
from shardkit.engines.api import Engine, OptimizerState
from shardkit.errors import CheckpointError
from shardkit.world import World

# How an optimizer computes, not what: the recipe's hold.
STRUCTURE = ("amsgrad", "centered")
SWITCHES = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a source is loaded."""

    strict: bool = True
    # False: what is missing on either side is told, not refused.
    include: Sequence[str] = ()
    # Globs on full names; empty = all.
    exclude: Sequence[str] = ()
    cast: bool = False
    # Let weights be loaded into another dtype.
    groups: Literal["checkpoint", "recipe"] = "checkpoint"
    # Whose optimizer options go on.

    def wants(self, name: str) -> bool:
        chosen = not self.include or any(fnmatch.fnmatchcase(name, glob) for glob in self.include)
        return chosen and not any(fnmatch.fnmatchcase(name, glob) for glob in self.exclude)


@dataclass(kw_only=True)
class Restored:
    """What was loaded, and what was not."""

    loaded: int = 0
    # Parameters and buffers.
    notes: list[str] = field(default_factory=list)
    # Whatever a user has to know, a sentence each.


Live = dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]
# (kind, full name) -> shape and dtype, of parameters and buffers over all ranks.


def restore(engine: Engine, source: Source, manifest: Manifest | None, choice: Choice, world: World) -> Restored:
    """Load weights, buffers and, from a checkpoint, the optimizer's state and options. A collective.

    Each rank reads only what it holds. Nothing live is touched before names, shapes, dtypes and parameter groups were
    found to fit.

    Args:
        engine: as it was opened.
        source: where the tensors are.
        manifest: of the checkpoint that is resumed; None = weights and buffers only.
        choice: what is loaded.
        world: the ranks.

    Raises:
        CheckpointError: on all ranks: something does not fit (nothing was changed), or cannot be read.
    """
    restored = Restored()
    live = _live(engine, world)
    names = agreed(world, "the checkpoint does not fit", lambda: _match(live, engine, source, choice, restored))
    optimizer = None
    if manifest is not None:
        optimizer = agreed(
            world, "the checkpoint does not fit", lambda: _optimizer(engine, manifest, choice, restored, names, live)
        )
    with ExitStack() as stack:
        intervals = agreed(
            world, "the state cannot be loaded", lambda: list(stack.enter_context(engine.load_state(optimizer)))
        )

        def read() -> None:
            for interval in intervals:
                name = names.get((interval.kind if interval.kind == "buffer" else "parameter", interval.name))
                key: Key = (interval.kind, name or "", interval.state)
                if name is None or source.find(key) is None:
                    continue  # A parameter of a flat group whose others have moments: its own are zeros.
                source.read(key, interval.start, interval.tensor)
                if interval.writeback is not None:
                    interval.writeback()

        agreed(world, "the state could not be read", read)
    # The adapter finds low-precision copies that were not refreshed.
    agreed(world, "the state that was loaded contradicts itself", lambda: [None for _ in engine.state()])
    restored.loaded = len(names)
    return restored


def _live(engine: Engine, world: World) -> Live:
    def look() -> Live:
        return {(i.kind, i.name): (i.shape, i.tensor.dtype) for i in engine.state() if i.kind != "optimizer"}

    own = agreed(world, "the live state contradicts itself", look)
    return {key: value for each in world.gather(own) for key, value in each.items()}


def _match(
    live: Live, engine: Engine, source: Source, choice: Choice, restored: Restored
) -> dict[tuple[str, str], str]:
    """(kind, live name) -> the name it has in the source, of what is loaded.

    Raises:
        CheckpointError: all that does not fit, in one message.
    """
    names: dict[tuple[str, str], str] = {}
    missing, problems, tied = [], [], []
    known = (
        {name for _, name in live}
        | {key[1] for key in source.entries if key[0] != "rng"}
        | set(source.aliases)
        | set(engine.aliases)
    )
    for glob in (*choice.include, *choice.exclude):
        if not fnmatch.filter(known, glob):
            problems.append(
                f"load: {glob!r} matches no name of the model or the checkpoint; there are {listed(sorted(known))}"
            )
    for (kind, name), (shape, dtype) in live.items():
        if not choice.wants(name):
            continue
        found = next((n for n in _candidates(name, engine) if source.find((kind, n, None))), None)
        entry = source.find((kind, found, None)) if found else None
        if entry is None:
            missing += [] if 0 in shape else [name]
        elif entry.shape != shape:
            problems.append(
                f"{name} has the shape {shape} here and {entry.shape} in the checkpoint (load.exclude leaves it out)"
            )
        elif DTYPES[entry.dtype] != dtype and not choice.cast:
            problems.append(
                f"{name} is {dtype} here and {DTYPES[entry.dtype]} in the checkpoint (load.cast=true converts it)"
            )
        else:
            names[kind, name] = found or name
    taken: dict[int, str] = {}
    for (kind, name), found in names.items():
        first = taken.setdefault(id(source.find((kind, found, None))), name)
        if first != name:
            tied.append(f"{name} and {first} are one tied tensor in the checkpoint and two here")
    held = {name for _, name in live} | set(engine.aliases)
    extra = [
        name
        for (kind, name, state), entry in source.entries.items()
        if kind != "rng" and state is None and choice.wants(name) and name not in held and entry.numel
        if not {alias for alias, kept in source.aliases.items() if kept == name} & held
    ]
    both = [
        f"{alias} and {name} are tied here and two tensors in the checkpoint"
        for alias, name in engine.aliases.items()
        if ("parameter", name, None) in source.entries and ("parameter", alias, None) in source.entries
    ]
    gaps = [*tied, *both]
    if missing:
        gaps.append(f"not in the checkpoint: {listed(missing)}")
    if extra:
        gaps.append(f"in the checkpoint and not in the model: {listed(extra)}")
    left_out = [name for _, name in live if not choice.wants(name)]
    if choice.strict and gaps:
        problems += [
            *gaps,
            "load.strict=false loads what fits, load.include and load.exclude choose by name",
        ]
    elif gaps:
        restored.notes += gaps
    if left_out:
        restored.notes.append(f"not loaded, as load.include and load.exclude say: {listed(left_out)}")
    if not names and not problems:
        problems.append("nothing of the checkpoint would be loaded")
    if problems:
        raise CheckpointError(
            "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        )
    return names


def _candidates(name: str, engine: Engine) -> Iterable[str]:
    """The names under which a live parameter may be stored."""
    yield name
    yield from (alias for alias, kept in engine.aliases.items() if kept == name)


def _optimizer(
    engine: Engine,
    manifest: Manifest,
    choice: Choice,
    restored: Restored,
    names: Mapping[tuple[str, str], str],
    live: Live,
) -> dict[str, OptimizerState]:
    """What the optimizer shall keep, by live name; its groups' options are set when all fits."""
    if manifest.optimizer != class_name(engine.optimizer):
        raise CheckpointError(
            f"the checkpoint's optimizer is {manifest.optimizer}, and this run's {class_name(engine.optimizer)}: its "
            "state means nothing to the other; keep the optimizer, or start from the weights alone with init_from"
        )
    saved = {name: index for index, group in enumerate(manifest.groups) for name in group["parameters"]}
    stored = {own: names["parameter", own] for group in engine.groups for own in group if ("parameter", own) in names}
    canonical = {own: manifest.aliases.get(name, name) for own, name in stored.items()}
    untrained = [own for own, name in canonical.items() if name not in saved]
    here = {manifest.aliases.get(name, name) for group in engine.groups for name in group} | set(canonical.values())
    dropped = [name for name in saved if name not in here and choice.wants(name)]
    gaps = []
    if untrained:
        gaps.append(
            f"trained here and not in the checkpoint, which has no optimizer state for them: {listed(untrained)}"
        )
    if dropped:
        gaps.append(f"trained in the checkpoint and not here: {listed(dropped)}")
    if gaps and choice.strict:
        raise CheckpointError(
            "; ".join([*gaps, "load.strict=false lets the first start without state, and drops the second"])
        )
    restored.notes += gaps
    _refuse_fresh(engine, manifest, canonical)
    if choice.groups == "recipe":
        _refuse_structure(engine, manifest)
    else:
        _set_options(engine, manifest, {own: saved[n] for own, n in canonical.items() if n in saved}, restored)
    kept = {own: _described(manifest, name, live["parameter", own][1]) for own, name in canonical.items()}
    return {own: state for own, state in kept.items() if state is not None}


def _refuse_fresh(engine: Engine, manifest: Manifest, canonical: Mapping[str, str]) -> None:
    """Where a group has one count of steps for all, a parameter without state cannot begin beside stepped ones.

    One that the checkpoint has and nothing ever trained is as in the run that made it.

    Raises:
        CheckpointError: names both, and the way out.
    """
    if not engine.traits.counts_steps_by_group:
        return
    trained = {name for group in manifest.groups for name in group["parameters"]}
    for index, group in enumerate(engine.groups):
        fresh = [own for own in group if canonical.get(own) not in trained]
        stepped = [own for own in group if own in canonical and manifest.numbers.get(canonical[own])]
        if fresh and stepped:
            raise CheckpointError(
                f"parameter group {index}: {listed(fresh)} would begin without state, and this backend counts the "
                f"steps of {stepped[0]} and all others of the group together: the first steps would be scaled "
                "otherwise than on other backends. Put what begins into a group of its own with parameter_groups, "
                "load its state too, or use a backend that keeps state by parameter"
            )


def _described(manifest: Manifest, name: str, dtype: torch.dtype) -> OptimizerState | None:
    """What the optimizer shall keep for a parameter of `dtype`: moments of the parameter's dtype are cast with it."""
    was = DTYPES[manifest.entries["parameter", name, None].dtype]
    tensors: dict[str, Entry] = {
        str(key[2]): entry for key, entry in manifest.entries.items() if key[:2] == ("optimizer", name)
    }
    numbers = decode(manifest.numbers.get(name, {}))
    if not tensors and not numbers:
        return None
    return OptimizerState(
        tensors={
            key: (entry.shape, dtype if DTYPES[entry.dtype] == was else DTYPES[entry.dtype])
            for key, entry in tensors.items()
        },
        scalars=numbers,
    )


def _set_options(engine: Engine, manifest: Manifest, saved: Mapping[str, int], restored: Restored) -> None:
    """Give each parameter group the options its parameters had.

    Raises:
        CheckpointError: a group's parameters had different ones, or one group's parameters are now in groups with
            different ones; nothing was changed.
    """
    options = [decode(group["options"]) for group in manifest.groups]
    chosen: list[dict[str, Any] | None] = []
    homes: dict[int, dict[int, str]] = {}
    for index, names in enumerate(engine.groups):
        first: dict[int, str] = {}
        for name in names:
            if name in saved:
                first.setdefault(saved[name], name)
                homes.setdefault(saved[name], {}).setdefault(index, name)
        one = next(iter(first), None)
        other = next((number for number in first if _kept(options[number]) != _kept(options[one or 0])), None)
        if one is not None and other is not None:
            raise CheckpointError(
                f"{first[one]} and {first[other]} are in one parameter group here and had different options in the "
                f"checkpoint ({_difference(options[one], options[other])}); {_ADVICE}"
            )
        chosen.append(None if one is None else options[one])
    groups = engine.optimizer.param_groups
    for spread in homes.values():
        here = list(spread)
        different = [index for index in here if _kept(groups[index]) != _kept(groups[here[0]])]
        if different:
            raise CheckpointError(
                f"{spread[here[0]]} and {spread[different[0]]} were in one parameter group in the checkpoint and have "
                f"different options here ({_difference(groups[here[0]], groups[different[0]])}); {_ADVICE}"
            )
    for index, (group, given) in enumerate(zip(groups, chosen, strict=True)):
        for key, value in (given or {}).items():
            if key not in group or key in SWITCHES:
                continue
            if key not in _moved_by_schedule(group) and group[key] != value:
                advice = (
                    "it decides what state there is" if key in STRUCTURE else "load.groups=recipe takes the recipe's"
                )
                restored.notes.append(
                    f"parameter group {index}: {key} is {_brief(value)} in the checkpoint and goes on, the recipe's "
                    f"{_brief(group[key])} does not hold ({advice})"
                )
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        if given and "initial_lr" not in given and "lr" in given and group.get("initial_lr") is not None:
            group["initial_lr"] = given["lr"]


def _refuse_structure(engine: Engine, manifest: Manifest) -> None:
    """Options that decide which tensors there are cannot be the recipe's.

    Raises:
        CheckpointError: one of them has changed.
    """
    for key in STRUCTURE:
        was = {decode(group["options"]).get(key) for group in manifest.groups}
        now = {group.get(key) for group in engine.optimizer.param_groups}
        if was != now:
            raise CheckpointError(
                f"the optimizer's {key} is {listed(sorted(map(str, now)))} here and {listed(sorted(map(str, was)))} in "
                "the checkpoint, and decides what state there is; keep it"
            )


def _moved_by_schedule(group: Mapping[str, Any]) -> set[str]:
    """Options of a group that its scheduler changes; what it started from tells whether the recipe has changed."""
    moved = {"lr"} if "initial_lr" in group else set()
    if any(key.endswith("_momentum") for key in group):
        # OneCycleLR and CyclicLR keep their bounds in the group.
        moved |= {"momentum", "betas", "base_momentum", "max_momentum"}
    return moved


_ADVICE = "keep the parameter groups, or take the recipe's options with load.groups=recipe"


def _kept(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key[:5] != "param" and key not in SWITCHES}


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    differing = [key for key in _kept(one) if one[key] != other.get(key)]
    return ", ".join(f"{key} {_brief(one[key])} and {_brief(other.get(key))}" for key in differing)


def _brief(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Names for people; the first few, and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
