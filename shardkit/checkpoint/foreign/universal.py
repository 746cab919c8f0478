"""DeepSpeed's universal folder: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt`, read and written.

The layout is that of deepspeed/checkpoint/ds_to_universal.py. `latest_universal` in the folder above names it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.export import whole
from shardkit.checkpoint.foreign.child import Job, open_all
from shardkit.checkpoint.foreign.imported import Found, Imported, split_state
from shardkit.checkpoint.foreign.plain import Kept
from shardkit.checkpoint.foreign.zero import KEPT, MODEL, found, options_of, shapes_of, step_in, untrained
from shardkit.checkpoint.manifest import Key, Manifest
from shardkit.checkpoint.source import Source
from shardkit.errors import CheckpointError, RequestError

LATEST = "latest_universal"
GLOBAL = "optimizer_state.pt"
_VERSION = "0.19.8"
# Of the layout that is written; DeepSpeed asks for one.


def read(folder: Path, scratch: Path) -> Imported:
    """A universal folder.

    Args:
        folder: of one step.
        scratch: where the process that opens the pickles leaves their tensors.

    Raises:
        RequestError: it is of a kind that is not known.
        CheckpointError: files are missing, or do not fit together.
    """
    models = sorted(path for path in folder.iterdir() if MODEL.fullmatch(path.name))
    if not models:
        raise RequestError(f"{folder} has no *_model_states.pt, which hold the shapes of the parameters")
    if len({match[2] for path in models if (match := MODEL.fullmatch(path.name))}) > 1:
        raise RequestError(f"{folder} is split over model-parallel ranks, which is not supported")
    # Stage 3 has one a rank.
    third = not models[0].name.startswith("mp_rank_")
    models = models if third else models[:1]
    states = sorted((folder / "zero").rglob("*.pt"))
    shared = [path for path in states if path == folder / "zero" / GLOBAL]
    values = [path for path in states if path not in shared]
    opened = open_all([Job(path=str(path)) for path in [*models, *shared, *values]], scratch)
    model, rest = opened[0], opened[len(opened) - len(values) :]
    common: Any = opened[len(models)] if shared else {}
    groups = shapes_of(model, models[0].name)
    sizes = {name: shape for group in groups for name, shape in group.items()}
    aliases = {str(alias): str(name) for alias, name in (model.get("shared_params") or {}).items()}
    # Of these, the folder may have copies cast to fp32.
    tensors: dict[Key, Found] = dict(untrained(opened[: len(models)], sizes, aliases, third))
    known = {name for _, name, _ in tensors} | set(aliases)
    numbers: dict[str, dict[str, Any]] = {}
    for path, value in zip(values, rest, strict=True):
        name, key = path.parent.relative_to(folder / "zero").as_posix(), path.stem
        if name in known:
            continue
        kept = value.get("param") if isinstance(value, dict) else value
        if not isinstance(kept, Kept) or not kept.shape:
            number = kept.tensor() if isinstance(kept, Kept) else kept
            if key != "fp32":
                numbers.setdefault(name, {}).update(split_state({key: number}, sizes.get(name, ()))[1])
                continue
        if not isinstance(kept, Kept):
            raise CheckpointError(f"{path} holds no tensor")
        shape = sizes.get(name, kept.shape)
        place: Key = ("parameter", name, None) if key == "fp32" else ("optimizer", name, key)
        tensors[place] = found(shape, [(kept, 0, kept.numel)])
    lost = [name for name in sizes if ("parameter", name, None) not in tensors]
    if lost:
        raise CheckpointError(f"{folder}/zero has no fp32.pt of {lost[0]}; it was not converted to its end")
    _add_steps(numbers, common, sizes)
    return Imported(
        origin="deepspeed-universal",
        world_size=1,
        step=step_in(model, numbers),
        tensors=tensors,
        numbers=numbers,
        groups=_groups(common, groups),
        aliases={alias: name for alias, name in aliases.items() if name in sizes},
        extra={key: model[key] for key in KEPT if model.get(key) is not None},
    )


def write(folder: Path, manifest: Manifest, source: Source) -> None:
    """Write `folder/global_step.../zero/...` and the file that names it, a tensor at a time.

    DeepSpeed loads it into ZeRO stages 1 and 2, and 3, with `"checkpoint": {"load_universal": true}`. It reads neither
    buffers nor frozen parameters from it; they are there for other readers.

    Raises:
        RequestError: it has no optimizer state, which DeepSpeed insists on.
    """
    trained = [name for group in manifest.groups for name in group["parameters"]]
    if not trained or not any(key[0] == "optimizer" for key in manifest.entries):
        raise RequestError("a universal folder needs the optimizer's state, and the checkpoint has none")
    tag = f"global_step{manifest.step}_universal"
    for key in manifest.entries:
        kind, name, state = key
        if kind in ("parameter", "weight", "optimizer"):
            home = folder / tag / "zero" / name
            home.mkdir(parents=True, exist_ok=True)
            torch.save({"param": whole(source, key)}, home / f"{state or 'fp32'}.pt")
    numbers = {name: decode(manifest.numbers.get(name, {})) for name in trained}
    for name, values in numbers.items():
        if "step" in values:
            torch.save(values["step"], folder / tag / "zero" / name / "step.pt")
    groups = [{**decode(group["options"]), "params": [index]} for index, group in enumerate(manifest.groups)]
    step = next((values["step"] for values in numbers.values() if "step" in values), torch.tensor(0.0))
    common = {
        "ds_version": manifest.versions.get("deepspeed", _VERSION),
        "param_groups": groups,
        # Where stage 3 looks for them.
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }
    torch.save(common, folder / tag / "zero" / GLOBAL)
    model = _model(manifest, source)
    # Stages 1 and 2 look for the first, stage 3 for the second.
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(model, folder / tag / file)
    (folder / LATEST).write_text(tag, encoding="utf-8")


def _model(manifest: Manifest, source: Source) -> dict[str, Any]:
    """What DeepSpeed asks of the model's file; the parameters themselves are elsewhere."""
    shapes = [
        OrderedDict((name, torch.Size(manifest.entries["parameter", name, None].shape)) for name in group["parameters"])
        for group in manifest.groups
    ]
    buffers = {key[1]: whole(source, key) for key in manifest.entries if key[0] == "buffer"}
    return {
        "module": buffers,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": dict(manifest.aliases),
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": manifest.step,
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "num_experts": [0],
    }


def _add_steps(numbers: dict[str, dict[str, Any]], common: Any, sizes: Mapping[str, Any]) -> None:
    """The number of steps, where the folders of the parameters have no step.pt."""
    inner = common.get("optimizer_state_dict") if isinstance(common, dict) else None
    states = inner.get("state") if isinstance(inner, dict) else None
    step = next((state["step"] for state in (states or {}).values() if "step" in state), None)
    if isinstance(step, Kept):
        step = step.tensor()
    for name in sizes:
        if step is not None and "step" not in numbers.get(name, {}):
            numbers.setdefault(name, {}).update(split_state({"step": step}, sizes[name])[1])


def _groups(common: Any, shapes: list[dict[str, tuple[int, ...]]]) -> list[dict[str, Any]]:
    """The parameter groups, where each names its flat groups by number."""
    options = (common.get("param_groups") if isinstance(common, dict) else None) or []
    return [
        {
            "parameters": [name for index in group.get("params", ()) for name in shapes[index]],
            "options": options_of(group),
        }
        for group in options
    ]
