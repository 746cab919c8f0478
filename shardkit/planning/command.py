"""`shardkit plan`: from a command line to the plan, the files it is written to, and what is printed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardkit.engines import registry
from shardkit.errors import RequestError
from shardkit.pages.page import NEEDS, can_draw
from shardkit.planning.amount import ranks
from shardkit.planning.device import UNIT_MISSING, Device, load_device, parse_bytes, why_little
from shardkit.recipe.backend import load_backend
from shardkit.recipe.here import import_from_here
from shardkit.recipe.load import Loaded, load

if TYPE_CHECKING:
    from shardkit.planning.planned import Planned

Found = TypeVar("Found")
SUFFIXES = {"--plot": (".png",), "--html": (".html", ".htm"), "--write": (".yaml", ".yml")}
AS_LAUNCHED = "launch.nproc_per_node=auto"
# Over a recipe whose own number of processes is not the one that is planned.
MEASURED = "measured"
# The name of the device that `--measure` wrote.
Processes = Callable[[Loaded, str], int]
# What a launch of a recipe would start on this machine's devices of a kind.


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line."""

    recipe: str
    overrides: Sequence[str] = ()
    backends: Sequence[str] | None = None
    # None = those that shard by themselves.
    device: str | None = None
    # A name in devices/, a path, or `measured`; None = this machine's.
    device_memory: str | None = None
    world_sizes: str | None = None
    # None = what a launch would start.
    nodes: int | None = None
    every: bool = False
    # Choices in the table.
    as_json: bool = False
    plot: Path | None = None
    html: Path | None = None
    write: Path | None = None
    measure: bool = False
    correct: bool = True
    # By earlier measurements.
    command: str = ""
    # As it was typed.


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line, understood."""

    loaded: Loaded
    overrides: Sequence[str]
    # It was loaded with.
    device: Device | None
    # None = this machine's.
    memory: int | None
    world_sizes: tuple[int, ...]
    # Empty = what a launch would start.


def run(asked: Asked, processes: Processes) -> int:
    """Plan, print, write; the exit code.

    Raises:
        RequestError: all that is wrong with the command line or the recipe; nothing was written.
    """
    request = understood(asked)
    import_from_here()
    from shardkit.planning.planned import measured, planned

    found = planned(asked, request, processes)
    if asked.measure:
        found = measured(found, asked)
    print(json.dumps(found.record(), indent=2) if asked.as_json else found.text(), flush=True)
    for said in _files(found, asked, request):
        print(f"shardkit: wrote {said}", file=sys.stderr)
    return 0


def _files(found: Planned, asked: Asked, request: Request) -> Iterator[str]:
    """Write what was asked for; the name of each file."""
    if asked.plot is not None:
        from shardkit.planning.bars import bars
        from shardkit.planning.plot import plot
        from shardkit.planning.table import shown

        drawn = bars(found.plan, shown(found.plan, every=found.every), found.measured)
        with _writing("--plot", asked.plot):
            asked.plot.parent.mkdir(parents=True, exist_ok=True)
            plot(drawn, asked.plot, f"Plan of {found.plan.loaded.recipe.name} on {found.plan.device.name}")
        yield str(asked.plot)
    if asked.html is not None:
        from shardkit.planning.html import page

        text = page(found, asked.command)
        with _writing("--html", asked.html):
            asked.html.parent.mkdir(parents=True, exist_ok=True)
            asked.html.write_text(text, encoding="utf-8")
        yield str(asked.html)
    if asked.write is not None:
        from shardkit.planning.write import write

        with _writing("--write", asked.write):
            more = write(
                found.plan,
                found.reason,
                recipe=asked.recipe,
                overrides=request.overrides,
                path=asked.write,
                # What a launch starts by itself needs no number.
                processes=bool(request.world_sizes) and (asked.nodes or 1) == 1,
            )
        yield f"{asked.write}{f' ({more})' if more else ''}"


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    """Say what keeps a file from being written, if something does."""
    try:
        yield
    except OSError as error:
        raise RequestError(_cannot(option, path, error)) from error


def _cannot(option: str, path: Path, error: OSError) -> str:
    return f"{option} {str(path)!r} cannot be written: {error.strerror or error}"


def understood(asked: Asked) -> Request:
    """The command line's values.

    Raises:
        RequestError: all that is wrong.
    """
    problems: list[str] = []

    def tried(make: Callable[[], Found]) -> Found | None:
        try:
            return make()
        except RequestError as error:
            problems.extend(str(error).splitlines())
        return None

    overrides = [*asked.overrides, *([] if asked.world_sizes is None else [AS_LAUNCHED])]
    loaded = tried(lambda: load(asked.recipe, overrides, options_of=registry.options_of))
    if asked.backends is not None and not asked.backends:
        problems.append("--backends names none; expected A,B,C")
    for name in asked.backends or ():
        if loaded is None or name != loaded.recipe.backend.name:
            tried(partial(_known, name))
    device = tried(lambda: device_named(asked.device))
    memory = tried(lambda: _memory(asked.device_memory))
    sizes = tried(lambda: _sizes(asked.world_sizes))
    if asked.nodes is not None and asked.nodes < 1:
        problems.append(f"--nodes {asked.nodes} is no number of nodes; expected 1 or more")
    for count in sizes or ():
        if count < (asked.nodes or 1):
            problems.append(f"--nodes {asked.nodes}: {ranks(count)} (--world-sizes) cannot lie on so many")
    problems += _wrong_files(asked)
    if problems or loaded is None:
        raise RequestError("\n".join(problems))
    return Request(loaded=loaded, overrides=overrides, device=device, memory=memory, world_sizes=sizes or ())


def device_named(name: str | None) -> Device | None:
    """A device of devices/, of a file, or the one that was measured on this machine; None stays None.

    Raises:
        RequestError: there is none.
    """
    if name is None:
        return None
    if name != MEASURED:
        return load_device(name)
    from shardkit.planning.history import device_file

    path = device_file()
    if not path.is_file():
        raise RequestError(
            "--device measured: no device has been measured here yet; shardkit plan RECIPE --measure does it"
        )
    return replace(load_device(str(path)), measured=True)


def _known(name: str) -> None:
    try:
        load_backend(name, options_of=registry.options_of)
    except RequestError as error:
        raise RequestError("\n".join(f"--backends: {line}" for line in str(error).splitlines())) from error


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        found = parse_bytes(text)
    except ValueError:
        raise RequestError(f"--device-memory {text!r} is no amount of memory; expected 80GiB or 512MiB") from None
    if found < UNIT_MISSING:
        raise RequestError(f"--device-memory {text!r}: {why_little(found)}")
    return found


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise RequestError(f"--world-sizes {text!r} is no list of numbers of processes; expected 1,2,4")
    return tuple(sorted({int(word) for word in words}))


def _wrong_files(asked: Asked) -> list[str]:
    problems = []
    files = {"--plot": asked.plot, "--html": asked.html, "--write": asked.write}
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        other = seen.setdefault(path.resolve(), option)
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if other != option:
            problems.append(f"{option} {str(path)!r} is the file of {other} too; give another name")
        if path.suffix.lower() not in SUFFIXES[option]:
            problems.append(f"{option} {str(path)!r} does not end in {' or '.join(SUFFIXES[option])}")
        if path.is_dir():
            problems.append(f"{option} {str(path)!r} is a folder; expected a file to write")
        elif os.path.lexists(path):
            problems.append(f"{option} {str(path)!r} is there already, and is not written over; give a new name")
        elif not folder.is_dir():
            problems.append(f"{option} {str(path)!r}: a file is where a folder should be")
        else:
            try:
                # What may be written is not always what permissions say.
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                problems.append(_cannot(option, path, error))
    if asked.plot is not None and importlib.util.find_spec("matplotlib") is None:
        problems.append("--plot needs matplotlib, which is not installed. pip install 'shardkit[plots]'")
    if asked.html is not None and not can_draw():
        problems.append(
            f"--html needs {' and '.join(NEEDS)}, not all of which is there. pip install 'shardkit[reports]'"
        )
    return problems
