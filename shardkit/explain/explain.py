"""From a recipe to what it means on each backend; nothing is started, written, or put on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shardkit.communication import Traffic, added
from shardkit.engines import registry
from shardkit.engines.api import Traits
from shardkit.engines.checks import check_backend
from shardkit.engines.meaning import Meaning, Situation, meaning_of
from shardkit.engines.start import check_parameters
from shardkit.engines.swapped import with_backend
from shardkit.errors import Problem, RecipeError, RequestError
from shardkit.explain.explanation import Explanation
from shardkit.explain.own import own_traffic
from shardkit.explain.schedule import schedule
from shardkit.explain.settings import fates, values
from shardkit.launch import preflight
from shardkit.recipe.build import check_options, check_targets, make_options
from shardkit.recipe.load import Loaded
from shardkit.subject import Kept, Subject, look
from shardkit.world import resolve_device

_OPTIONS = "backend.options."
_REACTIONS = {
    "error": "the run ends, naming rank and micro-batch; no update is made",
    "skip": "the step is left out on all ranks, and the scheduler waits",
}


def explain(loaded: Loaded, backends: Sequence[str], world_size: int | None = None) -> list[Explanation]:
    """The meaning of a recipe on each of `backends`.

    Args:
        loaded: the recipe; `explain_one` takes one with a backend of its own, as an arm of a comparison is.
        backends: names, paths of files, or adapters in full; the recipe's own by its name keeps its options. Options
            that the command line gives are given to all.
        world_size: ranks; None = what a launch would start, for each backend.

    Raises:
        RequestError: the recipe is wrong whatever the backend, or there is no such backend.
    """
    return [explain_one(with_backend(loaded, name), world_size) for name in backends]


def explain_one(loaded: Loaded, world_size: int | None = None) -> Explanation:
    """The meaning of a recipe on the backend it names.

    What the backend cannot honour is told as refused settings.

    Raises:
        RequestError: the recipe is wrong whatever the backend.
    """
    problems = check_targets(loaded)
    if problems:
        raise RecipeError(problems)
    recipe, refusals = loaded.recipe, []
    device = _device(loaded, refusals)
    ranks = world_size or preflight.processes(loaded, device)
    accumulation = max(1, recipe.gradient_accumulation_steps(ranks))
    refusals += _refused(loaded, recipe.check_world(ranks))
    sections: dict[str, Any] = {}
    translated: dict[str, str] = {}
    try:
        adapter = registry.load(recipe.backend.adapter)
        refusals += check_options(loaded, adapter.Options)
        sound = _without(loaded, {problem.key for problem in refusals})
        refusals += check_backend(sound, device, ranks)
        options = make_options(sound, adapter.Options)
        subject = look(loaded, world_size=ranks, accumulation=accumulation)
        traits = adapter.describe(options)
        if traits.shards:
            check_parameters(subject.model)
    except RecipeError:
        raise
    except RequestError as error:
        refusals.append(_problem(loaded, error))
    else:
        situation = Situation(
            anatomy=subject.anatomy,
            world_size=ranks,
            # Under exact a window is one forward.
            accumulation=1 if _joined(subject) else accumulation,
            precision=recipe.train.precision,
            max_grad_norm=recipe.train.max_grad_norm,
            micro_batch_size=recipe.batch.micro_batch_size,
        )
        meaning = meaning_of(adapter, options, situation)
        translated = dict(meaning.translated)
        sections = _sections(loaded, traits, meaning, situation, subject)
    return Explanation(
        backend=recipe.backend.name,
        adapter=recipe.backend.adapter,
        world_size=ranks,
        device=device,
        accumulation=accumulation,
        sections=sections,
        settings=fates(loaded, translated, refusals),
        recipe=values(loaded),
    )


def _problem(loaded: Loaded, error: RequestError) -> Problem:
    """What a backend, the policy or a glob refuses, at the key that its message begins with."""
    first = str(error).partition(":")[0].partition("[")[0]
    word = first.partition(".")[0]
    named = {"normalization": "normalization.policy"}
    key = named.get(word, word if word in ("blocks", "activation_checkpointing", "parameter_groups") else "backend")
    return Problem(place=loaded.place(key), key=key, message=str(error))


def _device(loaded: Loaded, refusals: list[Problem]) -> str:
    asked = loaded.recipe.launch.device
    try:
        return resolve_device(asked, 0).type
    except RequestError as error:
        message = str(error).removeprefix("launch.device: ")
        refusals.append(Problem(place=loaded.place("launch.device"), key="launch.device", message=message))
        return asked


def _refused(loaded: Loaded, complaints: Any) -> list[Problem]:
    return [Problem(place=loaded.place(key), key=key, message=message) for key, message in complaints]


def _without(loaded: Loaded, wrong: set[str]) -> Loaded:
    """The recipe without the options of these keys, which are refused."""
    backend = loaded.recipe.backend
    kept = {key: value for key, value in backend.options.items() if _OPTIONS + key not in wrong}
    return Loaded(replace(loaded.recipe, backend=replace(backend, options=kept)), loaded.origins, loaded.path)


def _joined(subject: Subject) -> bool:
    return any(layer.mode == "exact" for layer in subject.applied.layers)


def _sections(
    loaded: Loaded, traits: Traits, meaning: Meaning, situation: Situation, subject: Subject
) -> dict[str, Any]:
    recipe = loaded.recipe
    own = own_traffic(subject.applied.layers, world_size=situation.world_size, micro_steps=situation.accumulation)
    known = meaning.traffic is not None
    return {
        "dtypes": {
            "storage": meaning.storage,
            "compute": meaning.compute,
            "gather": meaning.gather,
            "reduce": meaning.reduce,
            "masters": meaning.masters,
            "norm_statistics": meaning.norm_statistics,
        },
        "loss": {
            "divided_by": "shardkit: the valid items of the window, of all micro-batches and ranks",
            "averaged_by": meaning.averages,
        },
        "clipping": {"where": meaning.clips, "limit": situation.max_grad_norm},
        "nonfinite": {"found_by": meaning.nonfinite, "then": _REACTIONS[recipe.train.nonfinite]},
        "unused_parameters": traits.unused_parameters,
        "shards": ", ".join(sorted(traits.shards)) or "nothing",
        "reduces": traits.reduces,
        "communication": _traffic(added(meaning.traffic or {}, own)) if known else None,
        "communication_least": _traffic(added(meaning.least or {}, own)) if known else None,
        "communication_notes": list(meaning.notes),
        "scheduler": schedule(recipe, [weight.name for weight in situation.anatomy.trainable]),
        "normalization": _norms(subject),
        "recomputed": list(subject.recomputed),
        "checkpoint": _checkpoint(situation, subject),
        "model": {
            "parameters": sum(weight.numel for weight in situation.anatomy.weights),
            "trainable": sum(weight.numel for weight in situation.anatomy.trainable),
            "units": len(situation.anatomy.units),
            "dropout": _drops_out(subject.model),
            "built_on": subject.built_on,
        },
    }


def _drops_out(model: nn.Module) -> bool:
    """Whether a layer of torch's draws masks; what a forward draws by itself is not seen."""
    rates = [m.p if isinstance(m, _DropoutNd) else getattr(m, "dropout", 0.0) for m in model.modules()]
    return any(isinstance(rate, float | int) and rate > 0 for rate in rates)


def _traffic(traffic: Traffic) -> dict[str, dict[str, int | None]]:
    return {
        kind: {"calls": volume.calls, "bytes": volume.bytes} for kind, volume in sorted(traffic.items()) if volume.bytes
    }


def _norms(subject: Subject) -> dict[str, Any]:
    applied = subject.applied
    layers: dict[str, int] = {}
    for row in applied.rows:
        change = row.old if row.old == row.new else f"{row.old} -> {row.new}"
        layers[f"{change}: {row.why}"] = layers.get(f"{change}: {row.why}", 0) + 1
    return {
        "policy": applied.policy,
        "explanation": applied.explanation,
        "layers": [f"{count} x {what}" for what, count in layers.items()],
    }


def _checkpoint(situation: Situation, subject: Subject) -> dict[str, Any]:
    """What is in a checkpoint of this run: whole tensors, whatever the backend cuts."""
    weights = situation.anatomy.weights
    parameters = Kept(tensors=len(weights), bytes=sum(weight.numel * weight.dtype.itemsize for weight in weights))
    kinds = {"parameters": parameters, "buffers": subject.buffers, "optimizer": subject.optimizer}
    found: dict[str, Any] = {kind: None if kept is None else kept.bytes for kind, kept in kinds.items()}
    known = [kept for kept in kinds.values() if kept is not None]
    whole = len(known) == len(kinds)
    return {
        "tensors": sum(kept.tensors for kept in known) if whole else None,
        "bytes": sum(kept.bytes for kept in known) if whole else None,
        **{f"{kind}_bytes": size for kind, size in found.items()},
        "also": "optimizer numbers, scheduler, data position, random streams",
    }


__all__ = ["explain", "explain_one"]
