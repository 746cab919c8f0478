"""How checkpoints come to disk: in which order, what is left when a step of it fails, and places without a disk."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.checkpoint.history import newest, retire, steps, supersede
from shardkit.checkpoint.save import content_of, write_checkpoint
from shardkit.checkpoint.storage import LocalStorage, RemoteStorage, open_storage
from shardkit.checkpoint.verification import open_verified
from shardkit.errors import CheckpointError
from shardkit.world import World
from tests.unit.checkpoint.conftest import trained

ALONE = World()


@pytest.fixture(scope="module")
def engine() -> Any:
    return trained()[1]


def save(engine: Any, root: str | Path, step: int, mark: int = 0, **more: Any) -> str:
    return shardkit.save_checkpoint(engine, str(root), step=step, training={"mark": mark}, **more)


def mark(root: str | Path, name: str) -> int:
    return open_verified(open_storage(str(root)), name, ALONE).training["own"]["mark"]


class Spy:
    """The order in which files and folders come to disk."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.events = root, []
        for name in ("fsync", "rename", "replace", "open"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if name == "fsync":
                # What is on disk is what the file has now.
                path = Path(f"/proc/self/fd/{args[0]}").readlink()
                self.events.append(("fsync", self._short(path), os.fstat(args[0]).st_size if path.is_file() else -1))
            elif name != "open":
                self.events.append((name, self._short(args[0]), self._short(args[1])))
            return result

        return call

    def _short(self, path: Any) -> str:
        path = Path(os.path.relpath(path, self.root))
        return "/".join("STAGING" if part.startswith(".tmp-step-") else part for part in path.parts) or "."

    def index(self, kind: str, first: str, second: Any = None) -> int:
        found = [
            number
            for number, event in enumerate(self.events)
            if event[:2] == (kind, first) and (second is None or event[2] == second)
        ]
        assert found, f"no {kind} of {first} in {self.events}"
        return found[-1]


def test_each_thing_is_on_disk_before_what_refers_to_it(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run" / "checkpoints"
    spy = Spy(root, monkeypatch)
    save(engine, root, 3, export=True)
    shard, final = "shard-00000-of-00001.safetensors", root / "step-00000003"
    sizes = {path.name: path.stat().st_size for path in final.iterdir()}
    # fsync is after the last write: the file has its final size then.
    order = [
        spy.index("fsync", f"STAGING/{shard}", sizes[shard]),
        spy.index("fsync", "STAGING/model.safetensors", sizes["model.safetensors"]),
        spy.index("fsync", "STAGING/.tmp-manifest.json", sizes["manifest.json"]),
        spy.index("replace", "STAGING/.tmp-manifest.json", "STAGING/manifest.json"),
        spy.index("fsync", "STAGING"),
        spy.index("rename", "STAGING", "step-00000003"),
    ]
    parent = [n for n, event in enumerate(spy.events) if event[:2] == ("fsync", ".")]
    latest = spy.index("fsync", ".tmp-latest", len("step-00000003\n"))
    assert order == sorted(order)
    assert any(order[-1] < n < latest for n in parent)
    assert latest < spy.index("replace", ".tmp-latest", "latest") < parent[-1] == len(spy.events) - 1
    # The folder of checkpoints itself is in its parent, and that in its own, before anything is in it.
    assert spy.index("fsync", "..") < order[0] and spy.index("fsync", "../..") < order[0]
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_a_folder_that_knows_no_fsync_will_do(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(engine, tmp_path, 3)
    assert mark(tmp_path, "step-00000003") == 0


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "latest"
    }


CALLS = ["fsync", "replace", "rename", "mkdir"]


def calls_of_a_save(engine: Any, root: Path) -> dict[str, int]:
    """How many calls of each kind it takes to save over a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        counts = {name: Failing(patch, name, 10**9) for name in CALLS}
        save(engine, root, 8, mark=2)
    return {name: count.seen for name, count in counts.items()}


class Failing:
    """A call of the system that fails once, the `at`th time it is made."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, at: int, code: int = errno.EIO) -> None:
        self.seen, real = 0, getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.seen == at + 1:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        patch.setattr(os, name, call)


@pytest.mark.parametrize("again", [False, True], ids=["another step", "the same step"])
@pytest.mark.parametrize("name", CALLS)
def test_wherever_a_save_fails_what_was_there_is_there(engine: Any, tmp_path: Path, name: str, again: bool) -> None:
    save(engine, tmp_path / "counted", 8, mark=1)
    count = calls_of_a_save(engine, tmp_path / "counted")[name]
    assert count > 0
    failed = 0
    for at in range(count):
        root = tmp_path / f"{at}"
        save(engine, root, 8, mark=1)
        before, step = files(root), 8 if again else 9
        with pytest.MonkeyPatch.context() as patch:
            Failing(patch, name, at)
            try:
                save(engine, root, step, mark=2)
            except CheckpointError as error:
                failed += 1
                assert "was not saved" in str(error) and "Input/output error" in str(error)
        now = {path: digest for path, digest in files(root).items() if path.startswith("step-00000008")}
        assert again or now == before, f"{name} {at}"
        # Saved over itself: the old one or the new one, never a mixture or neither.
        assert mark(root, "step-00000008") in ((1, 2) if again else (1,))
        open_storage(str(root)).clean()
        assert {path.name for path in root.iterdir()} <= {"latest", "step-00000008", f"step-{step:08d}"}
        for _, found in steps(open_storage(str(root))):
            mark(root, found)
        save(engine, root, step, mark=3)
        assert mark(root, f"step-{step:08d}") == 3
    # Only what does not matter any more may fail and leave a checkpoint that is saved.
    assert failed >= count // 2


class Died(BaseException):
    """The process ends here: nothing after it runs."""


@pytest.mark.parametrize("name", [*CALLS, "unlink", "rmdir"])
def test_wherever_a_process_ends_a_checkpoint_is_whole(engine: Any, tmp_path: Path, name: str) -> None:
    save(engine, tmp_path / "counted", 8, mark=1)
    for step in (8, 9):
        for at in range(40):
            root = tmp_path / f"{step}-{at}"
            save(engine, root, 7)
            save(engine, root, 8, mark=1)
            real, seen = getattr(os, name), iter(range(10**6))

            def call(*args: Any, real: Any = real, seen: Any = seen, at: int = at, **kwargs: Any) -> Any:
                if next(seen) >= at:
                    raise Died
                return real(*args, **kwargs)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, name, call)
                try:
                    save(engine, root, step, mark=2, keep_last=1)
                    finished = True
                except Died:
                    finished = False
            storage = open_storage(str(root))
            storage.clean()
            assert not [each for each in storage.names() if each.startswith(".")]
            for _, found in steps(storage):
                open_verified(storage, found, ALONE)
            last = newest(storage, ALONE)
            assert last is not None and last.manifest.step in (8, step), f"{name} {at}"
            assert last.manifest.training["own"]["mark"] in (1, 2)
            shutil.rmtree(root)
            if finished:
                assert at > 0
                break
        else:
            pytest.fail(f"40 calls of {name} were not enough")


def test_what_a_killed_writer_left_is_removed_and_the_old_one_put_back(engine: Any, tmp_path: Path) -> None:
    save(engine, tmp_path, 7)
    save(engine, tmp_path, 8, mark=1)
    (tmp_path / ".tmp-step-00000009-aa").mkdir()
    (tmp_path / ".tmp-step-00000009-aa" / "shard").write_bytes(b"x")
    (tmp_path / ".tmp-latest").write_bytes(b"x")
    shutil.copytree(tmp_path / "step-00000007", tmp_path / ".old-step-00000007")
    (tmp_path / "step-00000008").rename(tmp_path / ".old-step-00000008")
    storage = LocalStorage(tmp_path)
    assert sorted(storage.clean()) == [".old-step-00000007", ".tmp-latest", ".tmp-step-00000009-aa"]
    assert storage.names() == ["latest", "step-00000007", "step-00000008"]
    assert mark(tmp_path, "step-00000008") == 1


def test_a_folder_left_over_from_a_replacement_is_no_obstacle(engine: Any, tmp_path: Path) -> None:
    save(engine, tmp_path, 8, mark=1)
    shutil.copytree(tmp_path / "step-00000008", tmp_path / ".old-step-00000008")
    save(engine, tmp_path, 8, mark=2)
    assert mark(tmp_path, "step-00000008") == 2
    assert LocalStorage(tmp_path).names() == ["latest", "step-00000008"]


def test_latest_that_cannot_be_written_loses_no_checkpoint(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    assert save(engine, tmp_path, 8) == f"{tmp_path}/step-00000008"
    assert "was saved, but latest could not be written: Is a directory" in caplog.text
    assert LocalStorage(tmp_path).names() == ["latest", "step-00000008"]


# Retention.


def test_steps_are_compared_as_numbers(engine: Any, tmp_path: Path) -> None:
    save(engine, tmp_path, 9)
    for name in ("step-8", "step-100000000", "step-10", "superseded-step-11", "step-x", "step-12.tmp"):
        shutil.copytree(tmp_path / "step-00000009", tmp_path / name)
    storage = LocalStorage(tmp_path)
    assert [name for _, name in steps(storage)] == ["step-8", "step-00000009", "step-10", "step-100000000"]
    assert retire(storage, keep_last=2, keep=(), world=ALONE) == ["step-8", "step-00000009"]
    assert retire(storage, keep_last=1, keep=["step-10"], world=ALONE) == []
    assert retire(storage, keep_last=None, keep=(), world=ALONE) == []
    save(engine, tmp_path, 100_000_001, keep_last=1)
    assert [name for _, name in steps(storage)] == ["step-100000001"]
    assert {"superseded-step-11", "step-x", "step-12.tmp"} <= set(storage.names())


def test_nothing_is_deleted_when_the_newest_is_damaged(engine: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(engine, tmp_path, step)
    shard = tmp_path / "step-00000003" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xaa")
    with pytest.raises(CheckpointError, match=r"step-00000003/shard.* is damaged.*no older checkpoint was deleted"):
        retire(LocalStorage(tmp_path), keep_last=1, keep=(), world=ALONE)
    assert [step for step, _ in steps(LocalStorage(tmp_path))] == [1, 2, 3]
    found = newest(LocalStorage(tmp_path), ALONE)
    assert found is not None and found.name == "step-00000002" and "step-00000003" in found.broken[0]


# Places that fsspec reaches. "local://" is the same disk as "file://", by way of fsspec.


@pytest.fixture
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        # One memory for the whole process.
        return f"memory://{tmp_path.name}/run"
    return f"local://{tmp_path}/run"


everywhere = pytest.mark.parametrize("remote", ["memory", "local"], indirect=True)


@everywhere
def test_a_place_without_a_rename_holds_checkpoints_as_well(engine: Any, remote: str) -> None:
    for step in (8, 9, 10):
        save(engine, remote, step, mark=step, keep_last=2, export=True)
    storage = open_storage(remote)
    assert isinstance(storage, RemoteStorage)
    assert storage.names() == ["latest", "step-00000009", "step-00000010"]
    assert "model.safetensors" in storage.names("step-00000010")
    _, other = trained(steps=1, seed=4)
    assert shardkit.load_checkpoint(other, remote).training == {"mark": 10}
    assert shardkit.load_checkpoint(other, f"{remote}/step-00000009").training == {"mark": 9}
    assert all((a.tensor == b.tensor).all() for a, b in zip(engine.state(), other.state(), strict=True))
    save(engine, remote, 10, mark=11)
    assert mark(remote, "step-00000010") == 11
    assert storage.names() == ["latest", "step-00000009", "step-00000010"]
    assert supersede(storage, 9, ALONE) == ["step-00000010"]
    assert storage.names() == ["latest", "step-00000009", "superseded-step-00000010"]
    assert mark(remote, "superseded-step-00000010") == 11


@everywhere
def test_a_folder_without_its_manifest_is_cleaned_away(engine: Any, remote: str) -> None:
    save(engine, remote, 8)
    save(engine, remote, 9)
    storage = open_storage(remote)
    storage.remove("step-00000009/manifest.json")
    assert storage.clean() == ["step-00000009"]
    assert storage.names() == ["latest", "step-00000008"]
    assert storage.clean() == []


class Stops:
    """A remote place whose writer dies, or meets an error, at a call."""

    def __init__(self, patch: pytest.MonkeyPatch, storage: RemoteStorage, at: int, error: BaseException) -> None:
        self.seen, self.at, self.error = 0, at, error
        for name in ("cp_file", "pipe_file", "rm", "open"):
            patch.setattr(storage._fs, name, self._wrapped(getattr(storage._fs, name), name))

    def _wrapped(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and "w" not in [*args, *kwargs.values(), ""][1]:
                return real(*args, **kwargs)
            self.seen += 1
            if self.seen == self.at or (self.seen > self.at and isinstance(self.error, Died)):
                raise self.error
            return real(*args, **kwargs)

        return call


@everywhere
@pytest.mark.parametrize("error", [Died(), OSError(errno.EIO, "Input/output error"), RuntimeError("503")], ids=type)
def test_a_remote_checkpoint_survives_its_replacement_wherever_it_ends(
    engine: Any, remote: str, error: BaseException
) -> None:
    content = content_of(engine, step=8, training={"own": {"mark": 2}})
    for at in range(1, 60):
        for name in open_storage(remote).names():
            open_storage(remote).remove(name)
        save(engine, remote, 7)
        save(engine, remote, 8, mark=1)
        storage = open_storage(remote)
        assert isinstance(storage, RemoteStorage)
        with pytest.MonkeyPatch.context() as patch:
            stops = Stops(patch, storage, at, error)
            with suppress(Died, CheckpointError):
                write_checkpoint(storage, content, ALONE)
            ended = stops.seen < at
        open_storage(remote).clean()
        assert open_storage(remote).names() == ["latest", "step-00000007", "step-00000008"], at
        assert mark(remote, "step-00000008") in (1, 2), at
        if ended:
            assert at > 8 and mark(remote, "step-00000008") == 2
            return
    pytest.fail("60 calls were not enough")


def test_a_url_of_a_local_file_is_a_local_folder(engine: Any, tmp_path: Path) -> None:
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
    path = save(engine, f"file://{tmp_path}/run", 3)
    assert path == f"{tmp_path}/run/step-00000003" and Path(path).is_dir()
    assert shardkit.load_checkpoint(engine, f"file://{tmp_path}/run").step == 3


@pytest.mark.parametrize("url", ["nosuch://bucket/run", "gdrive://run", "dvc://x"])
def test_a_scheme_that_is_not_there_is_a_clear_error(engine: Any, url: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(engine, url, 3)
    why = str(caught.value).lower()
    assert url in why and any(word in why for word in ("install", "not known", "no module", "import"))
