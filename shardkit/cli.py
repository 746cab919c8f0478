"""The console command: `shardkit launch`, `shardkit doctor`, `shardkit recipes`, `shardkit backends`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardkit import shipped

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Training runs on any sharding backend.")


# Everything after `launch` is the launcher's own to read, --help too.
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def launch(context: typer.Context) -> None:
    """Check a recipe, then run it; the same as `python -m shardkit.launch`."""
    from shardkit.launch import stopping

    stopping.install(stopping.at_once)  # click would take a Ctrl-C during the imports for its own
    from shardkit.launch.command import main as launch_main

    raise typer.Exit(launch_main(context.args))


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


def _list(kind: shipped.Kind) -> None:
    """Each file's name, and the first comment line that says what it is rather than where its adapter is."""
    found = shipped.files(kind)
    width = max(map(len, found), default=0)
    for name, path in found.items():
        comments = [line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
        said = next((line for line in comments if line and not line.startswith("Adapter:")), "")
        typer.echo(f"{name:{width}}  {said}".rstrip())
