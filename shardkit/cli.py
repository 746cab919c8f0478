"""The console command `shardkit`: launch, plan, doctor, explain, compare, check, runs, and more."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardkit import shipped
from shardkit.errors import RequestError, ShardkitError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Training runs on any sharding backend.")
checkpoint = typer.Typer(no_args_is_help=True, help="Look at checkpoints: inspect, verify, diff.")
app.add_typer(checkpoint, name="checkpoint")

DIFFERENT = 5
# Exit code of a `diff` that finds differences.
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Which = Annotated[str, typer.Argument(metavar="PATH", help="a checkpoint, a folder of them, or a run folder; or a URL")]


# Everything after `launch` is the launcher's own to read, --help too.
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def launch(context: typer.Context) -> None:
    """Check a recipe, then run it; the same as `python -m shardkit.launch`."""
    from shardkit.launch import stopping

    stopping.install(stopping.at_once)  # click would take a Ctrl-C during the imports for its own
    from shardkit.launch.command import main as launch_main

    raise typer.Exit(launch_main(context.args))


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="path of the recipe")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="settings over it")] = None,
    backends: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="by default those that shard by themselves")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="in devices/, or `measured`; by default what this machine has"),
    ] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="80GiB", help="of a rank, in place of its own")] = None,
    world_sizes: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="numbers of processes; by default what a launch would start")
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="over which the processes lie")] = None,
    every: Annotated[bool, typer.Option("--all", help="show all choices")] = False,
    json: Json = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="draw what memory is used for")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="write one page with all of it")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="write a copy of the recipe with what is recommended")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="run some steps here, and keep what they need for later plans")
    ] = False,
    correction: Annotated[
        bool, typer.Option("--correction/--no-correction", help="by what was measured before on this model")
    ] = True,
) -> None:
    """Say what a recipe needs in memory on each backend, what fits, how long a step takes, and what to pick."""
    from shardkit.planning import command

    def run() -> int:
        from shardkit.launch import preflight

        asked = command.Asked(
            recipe=recipe,
            overrides=overrides or [],
            backends=None if backends is None else _split(backends),
            device=device,
            device_memory=device_memory,
            world_sizes=world_sizes,
            nodes=nodes,
            every=every,
            as_json=json,
            plot=plot,
            html=html,
            write=write,
            measure=measure,
            correct=correction,
            command=shlex.join(["shardkit", *sys.argv[1:]]),
        )
        return command.run(asked, preflight.processes)

    _end(run)


@app.command()
def doctor(
    recipe: Annotated[str, typer.Argument(help="path of the recipe")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="settings over it")] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the numbers")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="write a picture")] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FOLDER", help="write all, with the text")] = None,
) -> None:
    """Say what accumulation and ranks do to a recipe's BatchNorm layers, and what to do."""
    from shardkit.doctor import command

    files = command.Files.asked(json=json, plot=plot, folder=output)
    raise typer.Exit(command.doctor(recipe, overrides or [], files))


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="a shardkit checkpoint, a folder of them or a run folder; or a DCP or DeepSpeed folder"),
    ],
    out: Annotated[str, typer.Argument(help="what to write; nothing may be there yet")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="safetensors|hf|dcp|universal|shardkit",
            help="the format; by default safetensors for a name that ends so, shardkit for a DCP or DeepSpeed SOURCE, "
            "else hf (a Hugging Face folder)",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp16|fp32", help="cast parameters (safetensors, hf)")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="of a file of a Hugging Face folder")] = "5GB",
    trust: Annotated[
        bool, typer.Option("--trust", help="open pickles, which can run code of whoever made them, in a process apart")
    ] = False,
    optimizer: Annotated[
        str | None, typer.Option(metavar="CLASS", help="of a DCP or DeepSpeed SOURCE, as torch.optim.adam.Adam")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="of a DCP or DeepSpeed SOURCE that does not say it")] = None,
) -> None:
    """Convert a checkpoint to one safetensors file, a Hugging Face, DCP or DeepSpeed universal folder, or from those.

    From DCP and DeepSpeed (ZeRO 1, 2, 3, and universal) it makes a shardkit checkpoint, for any backend.
    """
    from shardkit.checkpoint import convert as command

    def run() -> int:
        options = command.Options(
            to=command.target_named(to),
            dtype=command.dtype_named(dtype),
            max_shard_size=command.parse_size(max_shard_size),
            trust=trust,
            optimizer=optimizer,
            step=step,
        )
        written = command.convert(source, out, options, lambda note: typer.echo(f"shardkit: {note}", err=True))
        typer.echo(f"shardkit: wrote {written}", err=True)
        return 0

    _end(run)


@checkpoint.command()
def inspect(
    path: Which,
    tensors: Annotated[bool, typer.Option("--tensors", help="a line a tensor")] = False,
    json: Json = False,
) -> None:
    """Say what a checkpoint is and holds, from its manifest alone; of several, a line each."""
    from shardkit.checkpoint import inspection
    from shardkit.checkpoint.place import checkpoints

    def run() -> int:
        places = checkpoints(path)
        if len(places) > 1:
            text, rows, broken = inspection.overview(places)
            _print(rows if json else text)
            return 1 if broken else 0
        manifest = places[0].manifest()
        show = inspection.as_json if json else inspection.as_text
        _print(show(places[0], manifest, tensors=tensors))
        return 0

    _end(run)


@checkpoint.command()
def verify(path: Which, json: Json = False) -> None:
    """Read all bytes of one or all checkpoints again, and name each damaged file; exit code 1 if there is one."""
    from shardkit.checkpoint import inspection
    from shardkit.checkpoint.place import checkpoints

    def run() -> int:
        verdicts = []
        for place in checkpoints(path):
            verdicts.append(inspection.verify(place))
            if not json:
                _print(inspection.verdict_text(verdicts[-1]))
        if json:
            _print([{"path": v.place.path, "ok": not v.damaged, "damaged": list(v.damaged)} for v in verdicts])
        return 1 if any(verdict.damaged for verdict in verdicts) else 0

    _end(run)


@checkpoint.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="a checkpoint; of a folder of them or a run, the newest")],
    b: Annotated[str, typer.Argument(metavar="B", help="another, of any backend and number of ranks")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="elements no further apart are the same")] = 0.0,
    json: Json = False,
) -> None:
    """Compare two checkpoints element by element; exit code 0 if they are equal, 5 if not."""
    from shardkit.checkpoint import difference
    from shardkit.checkpoint.place import one

    def run() -> int:
        found = difference.difference(one(a), one(b), tolerance)
        show = difference.as_json if json else difference.as_text
        _print(show(found, tolerance))
        return DIFFERENT if found.any else 0

    _end(run)


@app.command()
def compare(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE [key=value ...] | RUN RUN ...", help="a recipe to run, or runs that ended"),
    ],
    backends: Annotated[str, typer.Option(metavar="A,B,C", help="an arm each; the first is the reference")] = "",
    arm: Annotated[list[str] | None, typer.Option(metavar="'NAME: key=value ...'", help="one more arm")] = None,
    vs: Annotated[list[str] | None, typer.Option("--vs", metavar="RECIPE", help="another recipe, as an arm")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="key=value", help="for every arm")] = None,
    repeats: Annotated[int, typer.Option(help="of each arm, in turn: A B A B")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="stop each run there; the schedule stays")] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FOLDER", help="runs and report")] = None,
) -> None:
    """Run a recipe on several backends or with several settings, and say whether they are equal, and what to pick.

    Exit code 0 if all are equivalent to the first, 5 if not, 1 if one failed. The same command goes on when cut off.
    """
    from shardkit.compare import command

    def run() -> int:
        if Path(what[0]).is_dir():
            _refuse_options(context, "compare of runs that ended", besides=("what", "output"))
            return command.compare_runs(what, output)
        return command.compare(
            command.Wanted(
                recipe=what[0],
                overrides=[*what[1:], *(settings or [])],
                backends=_split(backends),
                arms=arm or [],
                versus=vs or [],
                repeats=repeats,
                steps=steps,
                output=output,
            )
        )

    _end(run)


@app.command()
def check(
    recipe: Annotated[str, typer.Argument(help="path of the recipe")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="settings over it")] = None,
    backends: Annotated[str, typer.Option(metavar="A,B,C", help="by default the recipe's")] = "",
    world_sizes: Annotated[str, typer.Option(metavar="1,2,4", help="numbers of processes")] = "1,2",
    output: Annotated[Path | None, typer.Option("--output", metavar="FOLDER", help="runs and check.json")] = None,
    json: Json = False,
) -> None:
    """Prove on a recipe's own model and data that backends agree with one process; exit code 0, or 5 where not."""
    from shardkit.compare import check as command

    def run() -> int:
        return command.check(
            command.Checked(
                recipe=recipe,
                overrides=overrides or [],
                backends=_split(backends),
                world_sizes=_numbers(world_sizes, "--world-sizes"),
                output=output,
                as_json=json,
            )
        )

    _end(run)


@app.command()
def explain(
    recipe: Annotated[str, typer.Argument(help="path of the recipe")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value", help="settings over it")] = None,
    backends: Annotated[str, typer.Option(metavar="A,B,C", help="by default the recipe's")] = "",
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="processes; by default what a launch would start")
    ] = None,
    json: Json = False,
) -> None:
    """Say what a recipe comes to on each backend: dtypes, collectives, clipping, and what becomes of each setting."""
    from shardkit.explain import command
    from shardkit.explain.table import table

    def run() -> int:
        found = command.explained(recipe, overrides or [], _split(backends), world_size)
        _print([each.to_json() for each in found] if json else table(found))
        return 0

    _end(run)


@app.command()
def runs(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="where to look")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs in a folder, the newest first: how far each has come, and how it ended."""
    from shardkit.compare import listing

    def run() -> int:
        if _is_given(context, "folder") and not folder.is_dir():
            raise RequestError(f"{str(folder)!r} is no folder; expected one with runs in it")
        found = listing.find_runs(folder)
        _print(listing.to_json(found) if json else listing.table(found) if found else f"no run in {folder}")
        return 0

    _end(run)


@app.command()
def recipes() -> None:
    """List the recipes that come with shardkit."""
    _list("recipes")


@app.command()
def backends() -> None:
    """List the backends that come with shardkit."""
    _list("backends")


def main() -> None:
    """Run the console command."""
    app()


def _end(run: Callable[[], int]) -> None:
    """End with what `run` returns, or with the message and code of what it refuses."""
    try:
        code = run()
    except ShardkitError as error:
        typer.echo(str(error), err=True)
        code = error.exit_code
    except BrokenPipeError:
        # Whoever read it has seen enough, as `head` has; nothing more can be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        typer.echo(f"{error.filename or 'the checkpoint'} cannot be read: {error.strerror or error}", err=True)
        code = 1
    raise typer.Exit(code)


def _refuse_options(context: typer.Context, what: str, besides: Sequence[str]) -> None:
    """Refuse the options of the command line that do not go with what was asked.

    Raises:
        RequestError: naming them.
    """
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name and option.name not in besides and _is_given(context, option.name)
    ]
    if given:
        raise RequestError(f"{', '.join(given)}: not for a {what}, which runs nothing; leave it out")


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _split(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _numbers(text: str, option: str) -> list[int]:
    """Whole numbers of 1 or more.

    Raises:
        RequestError: there is something else.
    """
    found = _split(text)
    if not found or not all(each.isdecimal() and int(each) > 0 for each in found):
        raise RequestError(f"{option} {text!r} is no list of numbers of processes; expected 1,2,4")
    return [int(each) for each in found]


def _print(found: object) -> None:
    """Text as it is, anything else as JSON."""
    if isinstance(found, str):
        typer.echo(found)
        return
    import json

    typer.echo(json.dumps(found, indent=2))


def _list(kind: shipped.Kind) -> None:
    """Each file's name, and the first comment line that says what it is rather than where its adapter is."""
    found = shipped.files(kind)
    width = max(map(len, found), default=0)
    for name, path in found.items():
        comments = [line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
        said = next((line for line in comments if line and not line.startswith("Adapter:")), "")
        typer.echo(f"{name:{width}}  {said}".rstrip())
