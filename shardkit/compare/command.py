"""The commands `shardkit compare` and `shardkit check`: jobs in turn, then what they show."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.compare import check as checking
from shardkit.compare.arms import ArmRequest, arms_of, is_option, on_backend
from shardkit.compare.jobs import Job, in_turn, make_folder, plan, run
from shardkit.compare.results import Arm, Comparison, Run, read_arm, read_run
from shardkit.compare.seed import write_seed
from shardkit.compare.watching import watching
from shardkit.engines import registry
from shardkit.errors import RequestError
from shardkit.recipe.here import import_from_here
from shardkit.recipe.load import load

FAILED, DIFFERENT = 1, 5
# Exit codes: an arm did not run to its end; the arms are not equivalent.
AGAIN = "again"
# Folder of the reference's further run, which shows how far it is from itself.
DECIDED = {
    "compare": {"run_dir": "--output names the folder of all runs", "train.stop_at_step": "--steps says it"},
    "check": {
        "run_dir": "--output names the folder of all runs",
        "train.stop_at_step": "a check makes three steps",
        "launch.nproc_per_node": "--world-sizes says it",
    },
}
# Settings that a command makes itself.


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `shardkit compare` was asked for."""

    recipe: str
    overrides: Sequence[str] = ()
    backends: Sequence[str] = ()
    arms: Sequence[str] = ()
    versus: Sequence[str] = ()
    repeats: int = 3
    steps: int | None = None
    output: Path | None = None


def compare(wanted: Wanted) -> int:
    """Run the arms in turn, judge, write the report; the exit code.

    Raises:
        RequestError: an arm's recipe has problems, or the folder holds something else; nothing was started.
    """
    requests = arms_of(
        wanted.recipe, wanted.overrides, backends=wanted.backends, arms=wanted.arms, versus=wanted.versus
    )
    if wanted.repeats < 1:
        raise RequestError(f"--repeats {wanted.repeats} compares nothing; expected 1 or more")
    _refuse_decided("compare", [word for arm in requests for word in arm.overrides])
    import_from_here()
    loaded, sizes = _checked({arm: f"arm {arm.name}: " for arm in requests})
    folder = _folder("compare", wanted.output)
    resolved = {name: each.recipe for name, each in loaded.items()}
    plan(folder, requests, resolved, {"repeats": wanted.repeats, "steps": wanted.steps})
    seeds = {arm.name: write_seed(loaded[arm.name].recipe, folder) for arm in requests}

    def job(arm: ArmRequest, repeat: int, name: str | None = None) -> Job:
        recipe = loaded[arm.name].recipe
        total = recipe.train.max_steps or wanted.steps or 0
        early = wanted.steps is not None and (recipe.train.max_steps is None or wanted.steps < recipe.train.max_steps)
        return Job(
            arm=arm,
            repeat=repeat,
            folder=folder / arm.name / (name or f"repeat-{repeat}"),
            steps=min(total, wanted.steps or total),
            settings=(
                *([f"train.stop_at_step={wanted.steps}"] if early else []),
                *([f"init_from={seeds[arm.name]}", "load.strict=false"] if seeds[arm.name] else []),
                "metrics.every=1",
                "metrics.profile=true",
            ),
        )

    jobs = list(in_turn(requests, wanted.repeats, job))
    if wanted.repeats == 1:
        jobs.append(job(requests[0], 1, AGAIN))
    with watching(jobs) as watcher:
        failures = run(jobs, watcher)
    noise = [_ended(job) for job in jobs if job.folder.name == AGAIN]
    arms = [
        replace(
            read_arm(arm.name, [each.folder for each in jobs if each.arm is arm and each.folder.name != AGAIN]),
            command=arm.command(*jobs[index].settings),
            explanation=_explanation(loaded[arm.name], sizes[arm.name]),
            runs=[_ended(each) for each in jobs if each.arm is arm and each.folder.name != AGAIN],
        )
        for index, arm in enumerate(requests)
    ]
    return _report(arms, noise or None, wanted.steps, folder, failed=bool(failures))


def compare_runs(folders: Sequence[str], output: Path | None) -> int:
    """Judge runs that have ended, the first of them the reference; the exit code.

    Raises:
        RequestError: there is no run in one of the folders, or one is named twice, or there are less than two.
    """
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not (path / "metrics.jsonl").is_file():
            raise RequestError(f"{str(path)!r} holds no run: there is no metrics.jsonl in it")
    if len(paths) < 2:
        raise RequestError("one run cannot be compared; name two or more run folders")
    places = [path.resolve() for path in paths]
    doubled = [str(path) for index, path in enumerate(paths) if places[index] in places[:index]]
    if doubled:
        raise RequestError(f"{doubled[0]!r} is named twice; name each run once")
    names = _names(paths)
    arms = [read_arm(name, [path]) for name, path in zip(names, paths, strict=True)]
    arms = [replace(arm, runs=[_whole(run) for run in arm.runs]) for arm in arms]
    failed = any(run.status == "failed" for arm in arms for run in arm.runs)
    return _report(arms, None, None, _folder("compare", output), failed=failed)


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
    _refuse_decided("check", wanted.overrides)
    import_from_here()
    backends = list(wanted.backends) or [
        load(wanted.recipe, wanted.overrides, options_of=registry.options_of).recipe.backend.name
    ]
    reference = checking.Place(backend=checking.REFERENCE, world_size=1)
    again = replace(reference, again=True)
    places = [checking.Place(backend=b, world_size=w) for b in backends for w in wanted.world_sizes]
    places = list(dict.fromkeys(places))
    # The reference is one process of plain torch: options of backends are not its.
    plain = [word for word in wanted.overrides if not is_option(word)]
    words = dict.fromkeys((reference, again), (*plain, f"backend={reference.backend}"))
    words |= {place: on_backend(wanted.recipe, wanted.overrides, place.backend) for place in places}
    requests = {
        place: ArmRequest(name=place.name, recipe=wanted.recipe, overrides=overrides)
        for place, overrides in words.items()
    }
    recipe = requests[reference].load().recipe
    cuts = {size: checking.cut(recipe.batch, size) for size in {1, *wanted.world_sizes}}
    loaded, _ = _checked(
        {request: f"{place.name}: " for place, request in requests.items()},
        {request.name: cuts[place.world_size] for place, request in requests.items()},
    )
    folder = _folder("check", wanted.output)
    facts = {"world_sizes": list(wanted.world_sizes), "check": True}
    items, dropout, norms = _facts(recipe)
    plan(folder, list(requests.values()), {name: each.recipe for name, each in loaded.items()}, facts)
    seed = write_seed(recipe, folder)
    more = [f"init_from={seed}", "load.strict=false"] if seed else []

    failures: dict[tuple[str, int], str] = {}

    def jobs(kind: str, clip: float | None) -> list[Job]:
        return [
            checking.make_job(
                requests[place],
                place,
                folder,
                kind,
                [*checking.probe_settings(recipe, place.world_size, items, kind=kind, clip=clip), *more],
            )
            for place in (reference, again, *places)
            if (place.name, 1) not in failures
        ]

    def reference_failed() -> bool:
        why = failures.get((reference.name, 1)) or failures.get((again.name, 1))
        if why:
            print(f"the reference itself failed: {why}", file=sys.stderr)
        return bool(why)

    first = jobs("gradient", None)
    with watching(first) as watcher:
        failures |= run(first, watcher)
    if reference_failed():
        return FAILED
    # Clipping must be on: at half of what the first gradient is, where the recipe does not clip.
    norm = checking.norm_of(folder / reference.name / "gradient")
    second = jobs("steps", None if recipe.train.max_grad_norm is not None else norm / 2)
    with watching(second) as watcher:
        failures |= run(second, watcher)
    if reference_failed():
        return FAILED
    precision = recipe.train.precision
    return _findings(wanted, folder, reference, again, places, failures, precision, dropout=dropout, norms=norms)


def _findings(
    wanted: Checked,
    folder: Path,
    reference: checking.Place,
    again: checking.Place,
    places: list[checking.Place],
    failures: dict[tuple[str, int], str],
    precision: str,
    *,
    dropout: bool,
    norms: bool,
) -> int:
    from shardkit.checkpoint.weights import open_weights

    seeds = sorted(folder.glob("seed-*.safetensors"))
    start = open_weights(str(seeds[0])) if seeds else None
    itself = checking.compare_place(folder, again, reference, start, precision)
    found = []
    for place in places:
        error = failures.get((place.name, 1), "")
        if error:
            found.append(checking.Finding(place=place, error=error, errors={}))
        else:
            found.append(checking.compare_place(folder, place, reference, start, precision))
    causes = {
        each.place.name: checking.cause(
            each, noisy=not itself.agrees, norms=norms, dropout=dropout, precision=precision
        )
        for each in found
        if each.first
    }
    report = {
        "reference": {**itself.to_json(), "place": reference.name},
        "places": [{**each.to_json(), "cause": causes.get(each.place.name)} for each in found],
    }
    (folder / "check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report) if wanted.as_json else checking.table(itself, found, causes))
    if any(each.error for each in found):
        return FAILED
    return 0 if all(each.agrees for each in found) else DIFFERENT


def _report(arms: list[Arm], noise: list[Run] | None, steps: int | None, folder: Path, *, failed: bool) -> int:
    from shardkit.compare.report import can_draw, render, table
    from shardkit.compare.verdict import are_equal, verdicts

    comparison = Comparison(arms=arms, reference=arms[0].name, noise=noise, steps=steps)
    judged = verdicts(comparison)
    print(table(comparison, judged))
    written = render(comparison, folder, judged)
    print(f"report: {', '.join(str(path) for path in written)}", file=sys.stderr)
    if not can_draw():
        print("report.html needs the extra reports: pip install 'shardkit[reports]'", file=sys.stderr)
    if failed:
        return FAILED
    return 0 if are_equal(judged) else DIFFERENT


def _checked(
    requests: Mapping[ArmRequest, str], settings: Mapping[str, Sequence[str]] | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Every arm's recipe and number of processes, checked as a launch checks it, before anything is started.

    Args:
        requests: the arms, and what a line about one begins with.
        settings: over an arm's own, by its name, for the check alone.

    Raises:
        RequestError: what is wrong, one a line; what is not wrong with all, with its arm.
    """
    from shardkit.launch import preflight

    loaded: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    problems: dict[str, list[str]] = {}
    for arm, said in requests.items():
        try:
            loaded[arm.name] = arm.load()
            sizes[arm.name] = preflight.check(arm.load(*(settings or {}).get(arm.name, ()))).world_size
        except RequestError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(said)
    if problems:
        lines = [
            f"{said}{line}"
            for line, sayings in problems.items()
            for said in ([""] if len(sayings) == len(requests) else sayings)
        ]
        raise RequestError("\n".join(lines))
    return loaded, sizes


def _refuse_decided(command: str, words: Sequence[str]) -> None:
    """Refuse settings of the command line that the command makes itself."""
    given = {word.partition("=")[0].strip() for word in words}
    for key, instead in DECIDED[command].items():
        if key in given:
            raise RequestError(f"{key} is not for shardkit {command}: {instead}; leave it out")


def _folder(command: str, output: Path | None) -> Path:
    return make_folder(output or Path("runs") / command / time.strftime("%Y%m%d-%H%M%S"))


def _facts(recipe: Any) -> tuple[int, bool, bool]:
    """(items of the training data, whether the model drops out, whether BatchNorm sees a rank's micro-batch)."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    from shardkit.data.loader import num_items
    from shardkit.recipe.build import build

    modules: list[nn.Module] = list(build(recipe.model).modules())
    dropout = any(isinstance(m, _DropoutNd) and m.p > 0 for m in modules)
    kept = recipe.normalization.policy in ("keep", "sync", "deferred", "auto")
    norms = kept and any(isinstance(m, _BatchNorm) for m in modules)
    return num_items(build(recipe.data.train)), dropout, norms


def _explanation(loaded: Any, world_size: int) -> dict[str, Any]:
    from shardkit.explain.explain import explain_one

    return explain_one(loaded, world_size).to_json()


def _ended(job: Job) -> Run:
    return _whole(read_run(job.folder))


def _whole(run: Run) -> Run:
    """A run that stopped where it was asked to has come to its end."""
    return replace(run, status="completed") if run.status == "stopped" and run.error is None else run


def _names(paths: Sequence[Path]) -> list[str]:
    """Short names that tell run folders apart."""
    for depth in range(1, 8):
        names = ["/".join(path.absolute().parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


__all__ = ["Checked", "Wanted", "check", "compare", "compare_runs"]
