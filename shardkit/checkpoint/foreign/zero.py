"""DeepSpeed's own checkpoint folder, of ZeRO stages 1, 2 and 3: flat partitions by rank, without a name in them.

Names and shapes are in `*_model_states.pt`, in the order of the partitions (deepspeed/utils/zero_to_fp32.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.foreign.child import Job, open_all
from shardkit.checkpoint.foreign.imported import Found, Imported, step_of
from shardkit.checkpoint.foreign.plain import Kept
from shardkit.checkpoint.foreign.unpickler import Thing
from shardkit.checkpoint.manifest import Key
from shardkit.errors import CheckpointError, RequestError

OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:(?:bf16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
KEPT = ("global_steps", "global_samples", "skipped_steps", "ds_version", "lr_scheduler", "dp_world_size")
# Of the model states, besides tensors.
Run = tuple[Kept, int, int]
# Elements of a tensor, from one to before another.


@dataclass(frozen=True, kw_only=True)
class Flat:
    """The partitions of all ranks, and where each parameter lies in them."""

    masters: Mapping[str, list[Run]]
    states: Mapping[str, Mapping[str, list[Run]]]
    numbers: Mapping[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def read(folder: Path, scratch: Path) -> Imported:
    """A folder with `*_model_states.pt` and `*_optim_states.pt`.

    Args:
        folder: of one step (`global_step...`).
        scratch: where the process that opens the pickles leaves their tensors.

    Raises:
        RequestError: it is of a kind that is not known.
        CheckpointError: files are missing, or do not fit together.
    """
    optimizer, model = _files(folder)
    opened = open_all([Job(path=str(folder / name)) for name in [*optimizer, *model]], scratch)
    states, models = opened[: len(optimizer)], opened[len(optimizer) :]
    inner = [_of(each, "optimizer_state_dict", name) for each, name in zip(states, optimizer, strict=True)]
    shapes = shapes_of(models[0], model[0])
    third = "fp32_flat_groups" in inner[0]
    flat = _third(inner, shapes) if third else _first_or_second(inner, shapes)
    tensors: dict[Key, Found] = {}
    sizes = {name: shape for group in shapes for name, shape in group.items()}
    for name, runs in flat.masters.items():
        tensors["parameter", name, None] = found(sizes[name], runs)
    for name, states_of in flat.states.items():
        for key, runs in states_of.items():
            tensors["optimizer", name, key] = found(sizes[name], runs)
    aliases = {str(alias): str(name) for alias, name in (models[0].get("shared_params") or {}).items()}
    tensors.update(untrained(models, sizes, aliases, third))
    stage = 3 if third else _stage(inner[0])
    return Imported(
        origin=f"deepspeed-zero{stage}",
        world_size=len(optimizer),
        step=step_in(models[0], flat.numbers),
        tensors=tensors,
        numbers=flat.numbers,
        groups=flat.groups,
        aliases={alias: name for alias, name in aliases.items() if name in sizes},
        extra={key: models[0][key] for key in KEPT if models[0].get(key) is not None},
    )


def shapes_of(model: Mapping[str, Any], name: str) -> list[dict[str, tuple[int, ...]]]:
    """Parameter -> shape by flat group, in the order in which they lie in it."""
    shapes = _of(model, "param_shapes", name)
    if not shapes:
        raise RequestError(f"{name} has no param_shapes: it was not saved by ZeRO, or without an optimizer")
    return [{str(key): tuple(map(int, shape)) for key, shape in group.items()} for group in shapes]


def step_in(model: Mapping[str, Any], numbers: Mapping[str, Mapping[str, Any]]) -> int | None:
    steps = model.get("global_steps")
    return int(steps) if isinstance(steps, int) else step_of(numbers)


def found(shape: tuple[int, ...], runs: Sequence[Run]) -> Found:
    """A tensor that lies in several places, one after the other."""

    def pieces() -> Iterator[torch.Tensor]:
        for kept, start, stop in runs:
            yield from kept.pieces(start, stop)

    return Found(shape=shape, dtype=runs[0][0].dtype if runs else torch.float32, pieces=pieces)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options, without what DeepSpeed keeps beside them."""
    options = {}
    for key, value in group.items():
        if str(key)[:5] == "param" or isinstance(value, Kept):
            continue
        # JSON has no tuples, and torch.optim's betas are one.
        options[str(key)] = tuple(value) if isinstance(value, list) else value
    return options


def _files(folder: Path) -> tuple[list[str], list[str]]:
    """The files of the optimizer and of the model, by rank."""
    names = sorted(path.name for path in folder.iterdir())
    optimizer = {name: match for name in names if (match := OPTIMIZER.fullmatch(name))}
    model = {name: match for name in names if (match := MODEL.fullmatch(name))}
    if any(int(match[2]) for match in [*optimizer.values(), *model.values()]):
        raise RequestError(
            f"{folder} is split over model-parallel ranks (mp_rank_01 and so on), which is not supported"
        )
    if any("expert" in name or name.startswith("layer_") for name in names):
        raise RequestError(f"{folder} has experts or pipeline layers in files of their own, which is not supported")
    if not optimizer or not model:
        raise RequestError(
            f"{folder} has no *_{'optim' if model else 'model'}_states.pt: expected a checkpoint that DeepSpeed saved "
            "with ZeRO stage 1, 2 or 3"
        )
    ranks = sorted(int(match[1]) for match in optimizer.values())
    if ranks != list(range(len(ranks))):
        lost = min(set(range(len(ranks) + 1)) - set(ranks))
        raise CheckpointError(f"{folder} lacks the *_optim_states.pt of rank {lost}; copy the files of all ranks")
    return (
        sorted(optimizer, key=lambda name: int(optimizer[name][1])),
        sorted(model, key=lambda name: int(model[name][1] or 0)),
    )


def _first_or_second(ranks: list[dict[str, Any]], shapes: list[dict[str, tuple[int, ...]]]) -> Flat:
    """Stages 1 and 2: the partitions of a group, one after the other, are its parameters in order."""
    _check_count(ranks)
    masters: dict[str, list[Run]] = {}
    states: dict[str, dict[str, list[Run]]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    paddings = ranks[0].get("param_alignment_paddings")
    for index, group in enumerate(shapes):
        places = _laid_out(group, paddings[index] if paddings else None)
        kept = [each["single_partition_of_fp32_groups"][index] for each in ranks]
        for name, start, stop in places:
            masters[name] = _cut(kept, start, stop, name)
        per_rank = [_base_state(each, index) for each in ranks]
        for key, first in per_rank[0].items():
            if isinstance(first, Kept) and first.shape:
                for name, start, stop in places:
                    states.setdefault(name, {})[key] = _cut([each[key] for each in per_rank], start, stop, name)
            else:
                for name, _, _ in places:
                    _number(numbers, name, key, first)
    base = ranks[0]["base_optimizer_state"]
    options = base["param_groups"] if isinstance(base, dict) else [{} for _ in shapes]
    groups = [{"parameters": list(g), "options": options_of(o)} for g, o in zip(shapes, options, strict=True)]
    return Flat(masters=masters, states=states, numbers=numbers, groups=groups)


def _base_state(rank: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What the optimizer keeps for a group; nothing before its first step."""
    base = rank["base_optimizer_state"]
    return base[index] if isinstance(base, list) else base["state"].get(index, {})


def _third(ranks: list[dict[str, Any]], shapes: list[dict[str, tuple[int, ...]]]) -> Flat:
    """Stage 3: every parameter is cut in as many equal parts as there are ranks, and padded."""
    _check_count(ranks)
    masters: dict[str, list[Run]] = {}
    states: dict[str, dict[str, list[Run]]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(shapes):
        kept = [each["fp32_flat_groups"][index] for each in ranks]
        per_rank = [each["optimizer_state_dict"]["state"].get(index, {}) for each in ranks]
        offset = 0
        for name, shape in group.items():
            part = math.ceil(math.prod(shape) / len(ranks))
            masters[name] = _parts(kept, offset, part, math.prod(shape), name)
            for key, first in per_rank[0].items():
                if isinstance(first, Kept) and first.shape:
                    own = [each[key] for each in per_rank]
                    states.setdefault(name, {})[key] = _parts(own, offset, part, math.prod(shape), name)
                else:
                    _number(numbers, name, key, first)
            offset += part
    groups = [
        {
            "parameters": [name for index in group["params"] for name in shapes[index]],
            "options": options_of(group),
        }
        for group in ranks[0]["optimizer_state_dict"]["param_groups"]
    ]
    return Flat(masters=masters, states=states, numbers=numbers, groups=groups)


def _parts(kept: list[Kept], offset: int, part: int, numel: int, name: str) -> list[Run]:
    """The part of each rank, without the padding at the end."""
    runs, left = [], numel
    for each in kept:
        length = min(part, left)
        if offset + length > each.numel:
            raise CheckpointError(f"the partitions are too short for {name}: files of several saves were mixed")
        if length:
            runs.append((each, offset, offset + length))
        left -= length
    return runs


def _laid_out(group: Mapping[str, tuple[int, ...]], paddings: Sequence[int] | None) -> list[tuple[str, int, int]]:
    """Where each parameter begins and ends in its flat group."""
    places, offset = [], 0
    for index, (name, shape) in enumerate(group.items()):
        places.append((name, offset, offset + math.prod(shape)))
        offset += math.prod(shape) + (paddings[index] if paddings else 0)
    return places


def _cut(kept: list[Kept], start: int, stop: int, name: str) -> list[Run]:
    """The elements from `start` to `stop` of the partitions, one after the other."""
    runs, first = [], 0
    for each in kept:
        begin, end = max(start, first), min(stop, first + each.numel)
        if begin < end:
            runs.append((each, begin - first, end - first))
        first += each.numel
    if first < stop:
        raise CheckpointError(f"the partitions are too short for {name}: files of several saves were mixed")
    return runs


def _number(numbers: dict[str, dict[str, Any]], name: str, key: str, value: Any) -> None:
    if isinstance(value, Kept):
        value = value.tensor()
    if isinstance(value, torch.Tensor | int | float | bool):
        counted = key == "step" and not isinstance(value, torch.Tensor)
        # FusedAdam counts in an int what torch.optim counts in a tensor.
        numbers.setdefault(name, {})[key] = torch.tensor(float(value)) if counted else value


def untrained(
    models: list[dict[str, Any]], trained: Mapping[str, Any], aliases: Mapping[str, str], third: bool
) -> Iterator[tuple[Key, Found]]:
    """Buffers and frozen parameters, which lie in the files of the model."""
    first = models[0]
    buffers = set(first.get("buffer_names") or ())
    shapes = first.get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        fragments = [each["frozen_param_fragments"][name] for each in (models if third else models[:1])]
        numel, runs, left = math.prod(shape), [], math.prod(shape)
        for fragment in fragments:
            runs.append((fragment, 0, min(fragment.numel, left)))
            left -= runs[-1][2]
        if left:
            raise CheckpointError(f"the files of the model hold {numel - left} of {numel} elements of {name}")
        yield ("parameter", str(name), None), found(tuple(map(int, shape)), runs)
    for name, kept in (first.get("module") or {}).items():
        known = name in trained or name in aliases or name in shapes
        if not isinstance(kept, Kept) or known or (third and name not in buffers):
            continue
        kind = "buffer" if name in buffers else "parameter"
        yield (kind, str(name), None), found(kept.shape, [(kept, 0, kept.numel)])


def _stage(rank: Mapping[str, Any]) -> int:
    value: Any = rank.get("zero_stage")
    # An enum of DeepSpeed's, or its number.
    value = value.args[0] if isinstance(value, Thing) and value.args else value
    return value if isinstance(value, int) else 2


def _check_count(ranks: list[dict[str, Any]]) -> None:
    count = ranks[0].get("partition_count")
    count = max(count) if isinstance(count, list) else count
    if isinstance(count, int) and count != len(ranks):
        raise CheckpointError(
            f"it was saved by {count} ranks, and there are {len(ranks)} *_optim_states.pt; copy the files of all of "
            "them, and none of another save"
        )


def _of(state: Any, key: str, name: str) -> Any:
    if not isinstance(state, dict) or key not in state:
        raise RequestError(
            f"{name} has no {key!r}: expected a checkpoint that DeepSpeed saved with ZeRO stage 1, 2 or 3"
        )
    return state[key]
