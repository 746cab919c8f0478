"""`shardkit check`: the backends agree with one process, on the user's own model and data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.checkpoint.source import Source
from shardkit.compare import finding as findings
from shardkit.compare.arms import ArmRequest, checked, is_option, on_backend, refuse_decided
from shardkit.compare.finding import Finding
from shardkit.compare.jobs import DIFFERENT, FAILED, Job, make_folder, plan, run
from shardkit.compare.place import AGAIN, RECUT, REFERENCES, WHOLE, Place
from shardkit.compare.probe import Probe, cut
from shardkit.compare.seed import seeded, write_seed
from shardkit.compare.watching import watching
from shardkit.engines import registry
from shardkit.errors import RequestError, ShardkitError
from shardkit.recipe.here import import_from_here
from shardkit.recipe.load import Loaded, load

DECIDED = {
    "run_dir": "--output names the folder of all runs",
    "train.stop_at_step": "a check makes three steps",
    "launch.nproc_per_node": "--world-sizes says it",
}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `shardkit check` was asked for."""

    recipe: str
    overrides: Sequence[str] = ()
    backends: Sequence[str] = ()
    world_sizes: Sequence[int] = (1, 2)
    output: Path | None = None
    as_json: bool = False


def check(wanted: Checked) -> int:
    """Prove on the recipe's own model and data that backends agree with one process; the exit code.

    Raises:
        RequestError: the recipe has problems, or cannot be cut as it must be; nothing was started.
    """
    refuse_decided("check", DECIDED, wanted.overrides)
    import_from_here()
    requests = _requests(wanted)
    whole = requests[WHOLE].load()
    loaded, _ = checked(
        {request: f"{place.name}: " for place, request in requests.items()},
        {request.name: cut(whole.recipe.batch, place) for place, request in requests.items()},
    )
    recipe = whole.recipe
    probe = Probe(recipe=recipe, items=_items(whole))
    norms = _has_norms(whole)
    folder = make_folder("check", wanted.output)
    facts = {"world_sizes": list(wanted.world_sizes), "check": True}
    plan(folder, list(requests.values()), {name: each.recipe for name, each in loaded.items()}, facts)
    start = seeded(write_seed(recipe, folder))
    failures: dict[str, str] = {}

    def ran(kind: str, steps: int, settings: Callable[[Place], list[str]]) -> bool:
        """Run a probe at every place that has not failed; whether the reference ended well."""
        jobs = [
            Job(
                arm=requests[place],
                repeat=1,
                folder=folder / place.name / kind,
                steps=steps,
                settings=(*settings(place), *start),
            )
            for place in requests
            if place.name not in failures
        ]
        with watching(jobs) as watcher:
            failures.update({name: error for (name, _), error in run(jobs, watcher).items()})
        failed = next((failures[place.name] for place in (WHOLE, AGAIN) if place.name in failures), "")
        if failed:
            print(f"the reference itself failed: {failed}\nruns and their logs: {folder}", file=sys.stderr)
        return not failed

    if not ran("gradient", 1, probe.gradient):
        return FAILED
    norm = findings.norm_of(folder / WHOLE.name / "gradient")
    if not ran("steps", probe.steps, lambda place: probe.stepped(place, norm)):
        return FAILED
    places = [place for place in requests if place not in REFERENCES]
    found = _judged(folder, places, failures, whole, probe.steps, norms=norms)
    (folder / "check.json").write_text(json.dumps(found.report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found.report) if wanted.as_json else found.table)
    print(f"runs and check.json: {folder}", file=sys.stderr)
    return found.code


@dataclass(frozen=True, kw_only=True)
class _Judged:
    report: dict[str, object]
    table: str
    code: int


def _judged(
    folder: Path,
    places: list[Place],
    failures: dict[str, str],
    whole: Loaded,
    steps: int,
    *,
    norms: bool,
) -> _Judged:
    precision = whole.recipe.train.precision
    held = findings.reference(folder, _start(folder, whole), precision, steps)

    def judged(place: Place) -> Finding:
        error = failures.get(place.name, "")
        return Finding(place=place, error=error, errors={}) if error else findings.compare(place, held)

    again, recut = judged(AGAIN), judged(RECUT)
    if recut.agrees and held.kind == "fp32":
        held = replace(held, tolerance=findings.narrowed(held.tolerance, recut))
    found = [judged(place) for place in places]
    draws = findings.draws(held)
    causes = {
        each.place.name: findings.cause(each, again, recut, norms=norms, draws=draws, precision=precision)
        for each in found
        if each.first
    }
    report = {
        "reference": {**again.to_json(), "place": WHOLE.name},
        "recut": recut.to_json(),
        "tolerance": held.tolerance,
        "not_compared": list(held.rounding),
        "places": [{**each.to_json(), "cause": causes.get(each.place.name)} for each in found],
    }
    agree = all(each.agrees for each in found)
    code = FAILED if any(each.error for each in found) else 0 if agree else DIFFERENT
    return _Judged(report=report, table=findings.table([again, recut], found, causes, held), code=code)


def _requests(wanted: Checked) -> dict[Place, ArmRequest]:
    """What each place runs, those of the reference first."""
    backends = list(wanted.backends) or [
        load(wanted.recipe, wanted.overrides, options_of=registry.options_of).recipe.backend.name
    ]
    # The reference is one process of plain torch: options of backends are not its.
    plain = tuple(word for word in wanted.overrides if not is_option(word))
    words: dict[Place, tuple[str, ...]] = dict.fromkeys(REFERENCES, (*plain, f"backend={WHOLE.backend}"))
    for backend in backends:
        for size in wanted.world_sizes:
            place = Place(backend=backend, world_size=size)
            # One process of plain torch as asked for is the reference's twin.
            if place not in words:
                words[place] = on_backend(wanted.recipe, wanted.overrides, backend)
    return {
        place: ArmRequest(name=place.name, recipe=wanted.recipe, overrides=overrides)
        for place, overrides in words.items()
    }


def _items(loaded: Loaded) -> int:
    """Items of the training data.

    Raises:
        RequestError: it cannot be built, or has no length.
    """
    from shardkit.data.loader import num_items
    from shardkit.recipe.build import build

    try:
        return num_items(build(loaded.recipe.data.train))
    except Exception as error:  # whatever a data set of the user's raises
        ours = isinstance(error, ShardkitError)
        said = str(error) if ours else f"cannot be built: {type(error).__name__}: {error}"
        raise RequestError(f"{loaded.place('data.train')}: data.train: {said}") from error


def _has_norms(loaded: Loaded) -> bool:
    """Whether BatchNorm layers see a micro-batch.

    Raises:
        RequestError: the model cannot be built.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    from shardkit.normalization.batch_norm import BatchNorm
    from shardkit.subject import bare_model

    whole = ("exact", "frozen")
    model = bare_model(loaded, world_size=1, accumulation=2).model
    return any(
        isinstance(m, _BatchNorm) and not (isinstance(m, BatchNorm) and m.mode in whole) for m in model.modules()
    )


def _start(folder: Path, loaded: Loaded) -> Source | None:
    """The weights that all places began with; None where they cannot be known."""
    from shardkit.checkpoint.weights import open_weights

    recipe = loaded.recipe
    seeds = sorted(folder.glob("seed-*.safetensors"))
    if seeds:
        return open_weights(str(seeds[0]))
    whole = not recipe.load.include and not recipe.load.exclude
    return open_weights(recipe.init_from) if recipe.init_from and whole else None


__all__ = ["Checked", "check"]
