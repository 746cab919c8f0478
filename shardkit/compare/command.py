"""`shardkit compare`: jobs in turn, then what they show."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.compare.arms import ArmRequest, arms_of, checked, refuse_decided
from shardkit.compare.jobs import DIFFERENT, FAILED, Job, in_turn, make_folder, plan, run
from shardkit.compare.results import Arm, Comparison, Run, read_arm, read_run
from shardkit.compare.seed import seeded, write_seed
from shardkit.compare.watching import watching
from shardkit.engines import registry
from shardkit.errors import RequestError, ShardkitError
from shardkit.recipe.here import import_from_here
from shardkit.recipe.load import load

AGAIN = "again"
# Folder of the reference's further run, which shows how far it is from itself.
DECIDED = {
    "run_dir": "--output names the folder of all runs",
    "train.stop_at_step": "--steps says it",
    "metrics.every": "every step is compared",
    "metrics.profile": "memory and communication are always measured",
}
# Settings that the command makes itself, and what says them.


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
    from shardkit.explain.explain import explain_one

    requests = arms_of(
        wanted.recipe, wanted.overrides, backends=wanted.backends, arms=wanted.arms, versus=wanted.versus
    )
    if wanted.repeats < 1:
        raise RequestError(f"--repeats {wanted.repeats} compares nothing; expected 1 or more")
    refuse_decided("compare", DECIDED, [word for arm in requests for word in arm.overrides])
    import_from_here()
    loaded, sizes = checked({arm: f"arm {arm.name}: " for arm in requests})
    explanations = {arm.name: explain_one(loaded[arm.name], sizes[arm.name]).to_json() for arm in requests}
    folder = make_folder("compare", wanted.output)
    resolved = {name: each.recipe for name, each in loaded.items()}
    plan(folder, requests, resolved, {"repeats": wanted.repeats, "steps": wanted.steps})
    starts = {arm.name: seeded(write_seed(loaded[arm.name].recipe, folder)) for arm in requests}

    def job(arm: ArmRequest, repeat: int, name: str | None = None) -> Job:
        recipe = loaded[arm.name].recipe
        total = explanations[arm.name].get("scheduler", {}).get("steps") or wanted.steps or 0
        own = min(total, recipe.train.stop_at_step or total)
        early = wanted.steps is not None and (not total or wanted.steps < total)
        kept = recipe.checkpoint.folder
        return Job(
            arm=arm,
            repeat=repeat,
            folder=folder / arm.name / (name or f"repeat-{repeat}"),
            steps=wanted.steps if early and wanted.steps else own,
            settings=(
                *([f"train.stop_at_step={wanted.steps}"] if early else []),
                # Runs of all arms have the same names.
                *([f"checkpoint.folder={kept.rstrip('/')}/{folder.resolve().name}/{arm.name}"] if kept else []),
                *starts[arm.name],
                "metrics.every=1",
                "metrics.profile=true",
            ),
        )

    jobs = list(in_turn(requests, wanted.repeats, job))
    if wanted.repeats == 1:
        jobs.append(job(requests[0], 1, AGAIN))
    try:
        with watching(jobs) as watcher:
            run(jobs, watcher)
    except KeyboardInterrupt:
        print(f"stopped; the same command with --output {folder} goes on", file=sys.stderr)
        raise
    noise = [_ended(job) for job in jobs if job.folder.name == AGAIN]
    arms = [
        replace(
            read_arm(arm.name, [each.folder for each in jobs if each.arm is arm and each.folder.name != AGAIN]),
            command=arm.command(*jobs[index].settings),
            explanation=explanations[arm.name],
            runs=[_ended(each) for each in jobs if each.arm is arm and each.folder.name != AGAIN],
        )
        for index, arm in enumerate(requests)
    ]
    return _report(arms, noise or None, wanted.steps, folder)


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
    import_from_here()
    arms = [read_arm(name, [path], explanation=_explained(path)) for name, path in zip(names, paths, strict=True)]
    arms = [replace(arm, runs=[_whole(run) for run in arm.runs]) for arm in arms]
    return _report(arms, None, None, make_folder("compare", output))


def _explained(path: Path) -> dict[str, Any] | None:
    """What the recipe of a run comes to; None where it cannot be known, as without the code that it names."""
    from shardkit.explain.explain import explain_one

    world_size = read_run(path).environment.get("world_size")
    try:
        return explain_one(load(str(path / "recipe.yaml"), [], options_of=registry.options_of), world_size).to_json()
    except (ShardkitError, OSError) as error:
        print(f"{path}: what its recipe comes to is not known: {error}", file=sys.stderr)
        return None


def _report(arms: list[Arm], noise: list[Run] | None, steps: int | None, folder: Path) -> int:
    from shardkit.compare.report import can_draw, render, table
    from shardkit.compare.verdict import are_equal, verdicts

    comparison = Comparison(arms=arms, reference=arms[0].name, noise=noise, steps=steps)
    judged = verdicts(comparison)
    print(table(comparison, judged))
    written = render(comparison, folder, judged)
    print(f"report: {', '.join(str(path) for path in written)}", file=sys.stderr)
    if not can_draw():
        print("report.html needs the extra reports: pip install 'shardkit[reports]'", file=sys.stderr)
    if any(run.status != "completed" for arm in arms for run in arm.runs):
        return FAILED
    return 0 if are_equal(judged) else DIFFERENT


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


__all__ = ["Wanted", "compare", "compare_runs"]
