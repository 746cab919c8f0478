"""What a run starts from and saves to, looked at before any process starts: the paths that a recipe names.

Only the file system of this machine is looked at; of a URL, that something can open it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shardkit.checkpoint.storage import MANIFEST
from shardkit.errors import Problem
from shardkit.recipe.load import Loaded
from shardkit.recipe.suggest import nearest

_CHECKPOINTS = f"step-*/{MANIFEST}"
_WEIGHTS = "*.safetensors"
_SHOWN = 8
# Names of a folder that a message lists.


def check_sources(loaded: Loaded) -> Iterator[Problem]:
    """What keeps checkpoint.resume and init_from from being read, and checkpoint.folder from being written to."""
    recipe = loaded.recipe
    resume = recipe.checkpoint.resume
    asked = {
        "checkpoint.resume": (None if resume in ("auto", "never") else resume, _not_resumed),
        "init_from": (recipe.init_from, _not_initial),
        "checkpoint.folder": (recipe.checkpoint.folder, _not_writable),
    }
    for key, (path, complaint) in asked.items():
        if path is None:
            continue
        try:
            if "://" in path:
                message = _unknown_scheme(path)
            else:
                # A folder to write into is made where it is missing.
                missing = "" if key == "checkpoint.folder" else _missing(path, key)
                message = missing or complaint(Path(path))
        except (OSError, ValueError) as error:
            message = f"cannot read {path!r}: {(isinstance(error, OSError) and error.strerror) or error}"
        if message:
            yield Problem(place=loaded.place(key), key=key, message=message)


def _not_writable(folder: Path) -> str:
    """Why no checkpoint can be written into a folder that may not be there yet; empty when one can."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{str(folder)!r} cannot be a folder: {there} is a file; name another"
    if not os.access(there, os.W_OK | os.X_OK):
        return (
            f"{str(folder)!r} cannot be written to: {there} does not let you; name another, or change its permissions"
        )
    return ""


def _unknown_scheme(url: str) -> str:
    """Why nothing here can open a URL; empty when something can."""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        return f"{url!r} cannot be opened: {error}"
    return ""


def _not_resumed(path: Path) -> str:
    """Why a path is nothing to resume from; empty when it is."""
    if not path.is_dir():
        return f"{str(path)!r} is a file; expected a checkpoint, which is a folder with {MANIFEST}, or a folder of them"
    return "" if _holds_checkpoint(path) else f"{_no_checkpoint(path)}{_inside(path)}"


def _not_initial(path: Path) -> str:
    """Why a path holds no weights to start with; empty when it does."""
    if not path.is_dir():
        expected = "expected a checkpoint, a .safetensors file, or a Hugging Face folder"
        return "" if path.suffix == ".safetensors" else f"{str(path)!r} is no .safetensors file; {expected}"
    if _holds_checkpoint(path) or any(path.glob(_WEIGHTS)):
        return ""
    return f"{_no_checkpoint(path)}, and no weights ({_WEIGHTS}){_pickles(path)}{_inside(path)}"


def _holds_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or any(path.glob(_CHECKPOINTS))


def _no_checkpoint(path: Path) -> str:
    return f"{str(path)!r} holds no checkpoint: there is no {MANIFEST} in it or in a step-* folder of it"


def _pickles(path: Path) -> str:
    found = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)), None)
    return f"; {found} is a pickle, which is not read: save it as safetensors" if found else ""


def _inside(path: Path) -> str:
    """Which folder in `path` was meant, or what is there at all."""
    meant = next((inner for inner in sorted(_folders(path)) if _holds_checkpoint(inner)), None)
    return f"; did you mean {str(meant)!r}?" if meant else f"; there is {_listed(path)}"


def _folders(path: Path) -> Iterator[Path]:
    return (inner for inner in path.iterdir() if inner.is_dir())


def _missing(path: str, key: str) -> str:
    """That nothing is at `path`, and what is at the nearest place that exists; empty when something is."""
    wanted = Path(path)
    if wanted.exists():
        return ""
    if path.startswith("~") and wanted.expanduser().exists():
        return f"{path!r} does not exist: ~ is not expanded here; write {str(wanted.expanduser())!r}"
    word = nearest(path, ("auto", "never")) if key == "checkpoint.resume" and len(wanted.parts) == 1 else None
    if word:
        return f"{path!r} is neither auto nor never, and no such path exists; did you mean {word!r}?"
    parent = next(each for each in wanted.parents if each.exists())
    missing = wanted.relative_to(parent).parts[0]
    where = "the working directory" if str(parent) == "." else repr(str(parent))
    if not parent.is_dir():
        return f"{path!r} does not exist: {where} is a file"
    # Among the numbers of steps the nearest in letters means nothing.
    near = None if missing.startswith("step-") else nearest(missing, [each.name for each in parent.iterdir()])
    hint = f"; did you mean {str(parent / near)!r}?" if near else ""
    return f"{path!r} does not exist; in {where} there is {_listed(parent)}{hint}"


def _listed(path: Path) -> str:
    """The first names in a folder."""
    names = sorted(each.name for each in path.iterdir())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "nothing"
