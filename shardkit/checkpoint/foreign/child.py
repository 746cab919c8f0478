"""A process that opens pickles and leaves plain data: all that it gets is a list of files and a folder to write to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shardkit
from shardkit.checkpoint.foreign.plain import read_plain, write_plain
from shardkit.checkpoint.foreign.unpickler import load_torch, loads
from shardkit.errors import CheckpointError

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
# Of the environment: nothing that a stranger's code could use to log in anywhere.


@dataclass(frozen=True, kw_only=True)
class Job:
    """A pickle to open."""

    path: str
    offset: int = 0
    length: int | None = None
    # Of the part of the file; None = all of it.
    bare: bool = False
    # A plain pickle, not what torch.save wrote.


def open_all(jobs: Sequence[Job], folder: Path) -> list[Any]:
    """The plain data of each job; the tensors are left in `folder`.

    Raises:
        CheckpointError: one cannot be opened.
    """
    folder.mkdir()
    # The child works in another folder than this process.
    absolute = [{**asdict(job), "path": str(Path(job.path).absolute())} for job in jobs]
    (folder / "jobs.json").write_text(json.dumps(absolute), encoding="utf-8")
    given = {key: os.environ[key] for key in _KEPT if key in os.environ}
    paths = [str(Path(shardkit.__file__).parent.parent), *sys.path]
    given |= {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}
    given |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__], cwd=folder, env=given, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}"
        raise CheckpointError(last)
    return [read_plain(folder, f"{number:06d}") for number in range(len(jobs))]


def main() -> None:
    for number, fields in enumerate(json.loads(Path("jobs.json").read_text(encoding="utf-8"))):
        job = Job(**fields)
        try:
            write_plain(_open(job), Path.cwd(), f"{number:06d}")
        except Exception as error:
            # The last line is the message.
            sys.exit(f"{job.path} cannot be opened: {type(error).__name__}: {' '.join(str(error).split())[:500]}")


def _open(job: Job) -> Any:
    if not job.bare:
        return load_torch(Path(job.path), job.offset, job.length)
    with Path(job.path).open("rb") as file:
        file.seek(job.offset)
        return loads(file.read(-1 if job.length is None else job.length), None)


if __name__ == "__main__":
    main()
