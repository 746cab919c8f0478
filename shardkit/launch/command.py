"""From a command line to the ranks: check a recipe, make its run folder, hand over to the agent.

The first pass does not import torch, so that a typo answers at once. Nothing is written or started before the
second pass has found no problem either.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit import run_folder
from shardkit.engines import registry
from shardkit.errors import RequestError
from shardkit.launch import agent, outer, stopping
from shardkit.recipe.here import import_from_here
from shardkit.recipe.load import load

if TYPE_CHECKING:
    from shardkit.launch.preflight import Preflight
    from shardkit.recipe.load import Loaded

REFUSED = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked on the command line."""

    recipe: str
    overrides: list[str]
    dry_run: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Launch what the command line asks for; the exit code."""
    return launch(parse(sys.argv[1:] if argv is None else argv))


def parse(argv: Sequence[str]) -> Request:
    """The command line as a request; ends the process with code 2 when it is none."""
    parser = argparse.ArgumentParser(
        prog="python -m shardkit.launch", description="Check a recipe, then run it.", allow_abbrev=False
    )
    parser.add_argument("recipe", help="path of the recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's")
    parser.add_argument("--dry-run", action="store_true", help="say what would run; start and write nothing")
    found = parser.parse_intermixed_args(argv)
    return Request(recipe=found.recipe, overrides=found.overrides, dry_run=found.dry_run)


def launch(request: Request) -> int:
    """Check and run a recipe, as the launcher or, under an outer launcher, as one of its ranks."""
    above = outer.find(os.environ)
    speaks = above is None or above.rank == 0
    stopping.install(stopping.at_once if speaks else stopping.quietly)
    try:
        loaded = load(request.recipe, request.overrides, options_of=registry.options_of)
        if above is not None and not request.dry_run:
            _become_rank(request, above, loaded)
        return _launch(request, loaded, above) if speaks else 0
    except RequestError as error:
        if speaks:
            print(error, file=sys.stderr)
        else:
            time.sleep(3.0)  # the launcher above ends all ranks with the first; rank 0 has something to say
        return REFUSED


def _launch(request: Request, loaded: Loaded, above: outer.Outer | None) -> int:
    _forget_left_over_ranks(above)
    import_from_here()
    recipe = loaded.recipe
    folder = run_folder.choose(
        recipe.name, recipe.run_dir, resume=recipe.checkpoint.resume, place=loaded.place("run_dir")
    )
    from shardkit.launch import preflight

    found = preflight.check(loaded, world_size=above.size if above else None)
    given = agent.environment(found.world_size, dict(os.environ))
    if request.dry_run:
        print(_plan(request, loaded, found, folder, given))
        return 0
    stopping.install(agent.stop_without_ranks(folder))
    folder.open(loaded.to_yaml())
    from shardkit import environment

    environment.write_machine(folder, environment.command_line())
    _say(
        f"{found.world_size} x {found.device}, backend {recipe.backend.name}, "
        f"accumulation {found.accumulation}, run folder {_shown(folder)}"
    )
    if given.note:
        _say(given.note)
    os.environ.update(given.values)
    return agent.run(folder, found.world_size)


def _become_rank(request: Request, above: outer.Outer, loaded: Loaded) -> None:
    """Go on as a rank of the launcher above, in this same process; does not return."""
    asked = loaded.recipe.launch.nproc_per_node
    if above.rank == 0 and isinstance(asked, int) and asked != above.local_size:
        _say(f"launch.nproc_per_node is {asked}, but {above.name} started {above.local_size} here; that counts")
    os.environ.update(above.environment)
    arguments = [
        "-m",
        agent.WORKER,
        request.recipe,
        *request.overrides,
        f"--outer={above.name}",
        f"--rank={above.rank}",
    ]
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", *arguments])


def _forget_left_over_ranks(above: outer.Outer | None) -> None:
    found = outer.left_over(os.environ) if above is None else {}
    if found:
        shown = " ".join(f"{name}={value}" for name, value in found.items())
        _say(f"ignoring {shown} from the environment: no launcher has set all of a rank's variables")
    for name in found:
        del os.environ[name]


def _plan(
    request: Request,
    loaded: Loaded,
    found: Preflight,
    folder: run_folder.RunFolder,
    given: agent.RankEnvironment,
) -> str:
    batch = loaded.recipe.batch
    command = agent.torchrun_command(found.world_size, request.recipe, request.overrides, given.values)
    return "\n".join(
        [
            loaded.to_yaml().rstrip(),
            "",
            f"# world size    {found.world_size} ({found.device})",
            f"# accumulation  {found.accumulation} ({batch.global_batch_size} items a step = "
            f"{batch.micro_batch_size} x {found.world_size} ranks x {found.accumulation} micro-steps)",
            f"# run folder    {_shown(folder)}",
            f"# under torchrun: {command}",
            "# dry run: nothing was started or written",
        ]
    )


def _shown(folder: run_folder.RunFolder) -> str:
    return f"{folder.path}" + (", going on with the run in it" if folder.goes_on else "")


def _say(line: str) -> None:
    print(f"shardkit: {line}", file=sys.stderr, flush=True)
