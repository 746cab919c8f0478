"""A place: which checkpoints a path means, as people type it.

A path names a checkpoint, a folder of them, or a run folder, locally or by a URL with a scheme.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardkit.checkpoint.agreement import described
from shardkit.checkpoint.history import is_checkpoint, steps
from shardkit.checkpoint.manifest import Manifest, read
from shardkit.checkpoint.storage import Storage, open_storage
from shardkit.checkpoint.verification import verify_files
from shardkit.errors import CheckpointError, RequestError

CHECKPOINTS = "checkpoints"
# Folder of a run's checkpoints.


@dataclass(frozen=True, kw_only=True)
class Place:
    """One checkpoint in its storage."""

    storage: Storage
    name: str

    @property
    def path(self) -> str:
        return join(self.storage.root, self.name)

    def manifest(self) -> Manifest:
        """Its manifest.

        Raises:
            CheckpointError: it is damaged.
        """
        return read(self.storage, self.name)


def join(root: str, name: str) -> str:
    """A path below `root`."""
    return f"{root.rstrip('/') or root}/{name}" if root not in ("", ".") else name


def split(path: str) -> tuple[str, str]:
    """The folder a path lies in, and its own name."""
    if "://" in path:
        scheme, _, rest = path.partition("://")
        above, _, name = rest.rstrip("/").rpartition("/")
        return f"{scheme}://{above}", name
    # "." and ".." have no name of their own.
    path = os.path.normpath(path)
    if os.path.basename(path) in ("", ".", ".."):  # noqa: PTH119
        path = os.path.abspath(path)  # noqa: PTH100
    above, name = os.path.split(path)
    return above or ".", name


def reach(root: str) -> Storage:
    """The storage at a path or URL that someone typed.

    Raises:
        RequestError: its scheme is not known, or what it needs is not installed.
    """
    try:
        return open_storage(root)
    except CheckpointError as error:
        raise RequestError(str(error)) from error


def is_local(path: str) -> bool:
    return "://" not in path


def checkpoints(path: str) -> list[Place]:
    """All checkpoints that `path` means, the oldest first.

    Raises:
        RequestError: it means none; the message says what is there instead.
    """
    try:
        return _checkpoints(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {described(error)}") from error


def one(path: str) -> Place:
    """The checkpoint that `path` names, or the newest in the folder it names whose files have their sizes.

    Raises:
        RequestError: it means none.
        CheckpointError: it means some, and each is damaged.
    """
    found = checkpoints(path)
    if len(found) == 1:
        return found[0]
    broken = []
    for place in reversed(found):
        try:
            manifest = place.manifest()
            verify_files(place.storage, place.name, manifest, manifest.files, "size")
        except CheckpointError as error:
            broken.append(str(error))
            continue
        return place
    raise CheckpointError(f"no checkpoint in {path} can be used: {'; '.join(broken)}")


def there(path: str) -> str:
    """What is at a path, for an error that says what was expected instead."""
    storage = reach(path)
    names = storage.names()
    if names:
        return f"it holds {_some(names)}"
    if is_local(path) and os.path.isfile(path):  # noqa: PTH113
        return "it is a file"
    if is_local(path) and os.path.isdir(path):  # noqa: PTH112
        return "it is an empty folder"
    above, _ = split(path)
    beside = reach(above).names()
    return f"there is no such path; {above} " + (f"holds {_some(beside)}" if beside else "is empty or not there either")


def _checkpoints(path: str) -> list[Place]:
    above, name = split(path)
    storage = reach(above)
    if is_checkpoint(storage, name):
        return [Place(storage=storage, name=name)]
    for folder in (path, join(path, CHECKPOINTS)):
        inside = reach(folder)
        found = [Place(storage=inside, name=name) for _, name in steps(inside)]
        if found:
            return found
    raise RequestError(
        f"{path} is no shardkit checkpoint (a folder with manifest.json), no folder of checkpoints (step-...) and no "
        f"run folder with some: {there(path)}"
    )


def _some(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
