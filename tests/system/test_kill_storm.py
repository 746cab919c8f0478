"""Jobs that save all the time and are killed at any moment: no checkpoint is lost, none is half one."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.export import whole
from shardkit.checkpoint.history import steps
from shardkit.checkpoint.source import source_of
from shardkit.checkpoint.storage import LocalStorage
from shardkit.checkpoint.verification import open_verified
from shardkit.world import World
from tests.conformance.conftest import backend_named
from tests.system.launches import launch, make_project, metrics

KILLS, QUICK = 200, 6
PLACES = [(name, background) for name in ("ddp", "fsdp2", "zero2") for background in (False, True)]
SIZE = 100_003
# Elements: a save takes about 30 ms, a step a few.
SECONDS = 60.0


class Storm:
    """One job after another in one folder, each killed."""

    def __init__(self, fork_server: Any, folder: Path, seed: int) -> None:
        self._fork_server, self._folder = fork_server, folder
        self._dice = random.Random(seed)
        self.storage = LocalStorage(folder / "run")
        self._journal = folder / "journal"
        self._journal.touch()
        self._digests: dict[str, str] = {}
        self.newest, self.in_save, self.resumes = 0, 0, 0

    def strike(self, number: int) -> None:
        """Start a job, kill it, and look at what there is."""
        name, background = PLACES[number % len(PLACES)]
        before, left = len(self._lines()), self._left_over()
        processes = self._start(number, name, background)
        try:
            if number % 8 == 7:
                # Anywhere, also before it has begun.
                time.sleep(self._dice.uniform(0, 0.8))
            else:
                self._wait(lambda: len(self._lines()) > before, processes)
                assert not left & self._left_over(), "what a killed job left is still there"
                time.sleep(self._dice.uniform(0, 0.5))
                if number % 8 in (0, 3, 5, 6):
                    self._wait(self._left_over, processes)
                    time.sleep(self._dice.uniform(0, 0.02))
        finally:
            self._kill(processes)
        self.in_save += bool(self._left_over())
        self._check(self._lines()[before:])

    def _start(self, number: int, name: str, background: bool) -> list[Any]:
        from tests.conformance.ranks import rank_main

        ranks = self._folder / f"ranks-{number}"
        ranks.mkdir()
        arguments = (backend_named(name), self.storage.root, str(self._journal), background, SIZE)
        function = "tests.conformance.robust_ranks:storm"
        processes = [
            self._fork_server.Process(target=rank_main, args=(rank, 2, str(ranks), function, arguments))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        return processes

    def _wait(self, there: Callable[[], object], processes: list[Any]) -> None:
        deadline = time.monotonic() + SECONDS
        while not there():
            assert all(process.is_alive() for process in processes), self._logs()
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.001)

    def _kill(self, processes: list[Any]) -> None:
        """All at once, or one a moment after the other; a rank whose peer is gone may have ended by itself."""
        self._dice.shuffle(processes)
        for process in processes:
            process.kill()
            time.sleep(self._dice.choice([0, 0, 0.003, 0.02]))
        for process in processes:
            process.join()

    def _check(self, lines: list[str]) -> None:
        found = steps(self.storage)
        digests = {name: self._digest(name) for _, name in found}
        for name, digest in digests.items():
            assert self._digests.get(name, digest) == digest, f"{name} has changed"
        self._digests = digests
        for step, name in found:
            self._check_content(step, name)
        newest = found[-1][0] if found else 0
        assert newest >= self.newest, f"step {self.newest} was there, and {newest} is now"
        for line in lines:
            what, step = line.split()
            if what == "resumed":
                self.resumes += 1
                assert int(step) == self.newest, f"{line}, and step {self.newest} was there"
            assert int(step) <= newest, f"{line}, and the newest is {newest}"
        self.newest = newest

    def _check_content(self, step: int, name: str) -> None:
        """All of it verifies, and is of that one step."""
        manifest = open_verified(self.storage, name, World())
        source = source_of(self.storage, name, manifest)
        assert manifest.training["step"] == manifest.step == step
        kinds = [kind for kind, _, _ in manifest.entries]
        assert kinds.count("parameter") == kinds.count("optimizer") == 2
        for kind, key, state in manifest.entries:
            if kind != "rng":
                expected = -step * (step + 1) / 2 if kind == "parameter" else step
                assert torch.all(whole(source, (kind, key, state)) == expected), f"{name}: {state} of {key}"

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        for path in sorted((self._folder / "run" / name).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def _left_over(self) -> set[str]:
        return {name for name in self.storage.names() if name.startswith(".")}

    def _lines(self) -> list[str]:
        """Of the journal, those that were written to their end."""
        return [line for line in self._journal.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _logs(self) -> str:
        newest = max(self._folder.glob("ranks-*"), key=lambda path: path.stat().st_mtime)
        return "\n".join(path.read_text()[-3000:] for path in sorted(newest.glob("log-*")))


@pytest.mark.parametrize("kills", [QUICK, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_loses_no_checkpoint(
    fork_server: Any, tmp_path: Path, kills: int, record_property: pytest.RecordProperty
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    storm = Storm(fork_server, tmp_path, seed)
    for number in range(kills):
        storm.strike(number)
    summary = {"kills": kills, "in a save": storm.in_save, "resumes": storm.resumes, "steps": storm.newest}
    print(summary)
    for key, value in summary.items():
        record_property(key, value)
    assert storm.newest > 0 and storm.resumes >= kills * 3 // 4
    if kills >= 100:
        # Half of the jobs are killed in the first 20 ms of one.
        assert storm.in_save >= kills // 4


SAVING = '''
import os, signal
import toy
from shardkit.checkpoint import save

real, seen = save.write_shard, []

def write_shard(storage, folder, name, parts):
    """Rank 1 is killed while it writes its third shard."""
    seen.append(name)
    if len(seen) == 3 and name.startswith("shard-00001") and not os.path.exists("killed"):
        with storage.create(f"{folder}/{name}") as file:
            file.write(b"the beginning of a shard")
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return real(storage, folder, name, parts)

save.write_shard = write_shard

class Numbers(toy.Numbers):
    pass
'''


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_rank_killed_in_a_save_ends_the_job_and_the_checkpoint_before_goes_on(
    tmp_path: Path, asynchronous: str
) -> None:
    project = make_project(tmp_path)
    (project / "saving.py").write_text(SAVING)
    more = ["data.train._target_=saving.Numbers", "checkpoint.every=1", f"checkpoint.asynchronous={asynchronous}"]
    first = launch(project, "toy.yaml", "run_dir=run", *more)
    assert first.code == 1, first.err[-2000:]
    assert "rank 1 was killed by SIGKILL" in first.err and "Traceback" not in first.err
    assert first.at - (project / "killed").stat().st_mtime < 20
    left = {path.name for path in (project / "run" / "checkpoints").iterdir()}
    assert {"step-00000001", "step-00000002"} <= left and "step-00000003" not in left
    assert any(name.startswith(".tmp-step-00000003-") for name in left)
    second = launch(project, "toy.yaml", "run_dir=run", *more)
    assert second.code == 0, second.err[-2000:]
    assert "going on from" in second.err + second.out and "step-00000002" in second.err + second.out
    lines = metrics(project / "run")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 8))
    names = {path.name for path in (project / "run" / "checkpoints").iterdir()}
    assert names == {"latest", "step-00000006", "step-00000007"}
