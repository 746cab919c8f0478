"""The keeper of one process: which checkpoints stay, what is told when, and what a background save holds."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.checkpoint import keeper as keeper_module
from shardkit.checkpoint.export import whole
from shardkit.checkpoint.history import newest, steps
from shardkit.checkpoint.keeper import Keeper
from shardkit.checkpoint.save import write_checkpoint
from shardkit.checkpoint.source import source_of
from shardkit.checkpoint.storage import LocalStorage
from shardkit.checkpoint.verification import open_verified
from shardkit.errors import CheckpointError
from shardkit.launch.failure import is_consequence
from shardkit.recipe.schema import Checkpoint
from shardkit.seeds import read_streams
from shardkit.world import World

STREAMS = read_streams(torch.device("cpu"))


def plain(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.1)


def open_engine(steps: int = 1) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    engine = shardkit.open_engine("single", net, plain)
    step(engine, steps)
    return engine


def step(engine: Any, times: int = 1) -> None:
    for _ in range(times):
        with engine.micro_step(True):
            engine.backward(engine.model(torch.randn(4, 5)).square().mean())
        engine.step()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Keeper]:
    """`make(every=1, ...)`: a keeper with these settings, of a fresh engine, in `tmp_path`."""
    return lambda **settings: Keeper(open_engine(), LocalStorage(tmp_path), Checkpoint(**settings))


def kept(folder: Path) -> list[int]:
    return [step for step, _ in steps(LocalStorage(folder))]


def run(keeper: Keeper, scores: dict[int, float]) -> None:
    """Steps with these scores of an evaluation; the loop does the same."""
    for number, value in scores.items():
        if keeper.is_due(number, asked=False, scores={"accuracy": value}):
            keeper.save(number, {"best": keeper.best, "step": number}, STREAMS)
    keeper.close()


def damage(path: Path) -> None:
    shard = path / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xaa")


class Broken:
    """`write_checkpoint` that fails at the steps given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *at: int) -> None:
        def write(storage: Any, content: Any, world: World, **more: Any) -> str:
            if content.step in at:
                raise CheckpointError(f"no room for {content.step}")
            return write_checkpoint(storage, content, world, **more)

        monkeypatch.setattr(keeper_module, "write_checkpoint", write)


both = pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])


@both
def test_the_best_stays_while_it_is_the_best(make: Any, tmp_path: Path, asynchronous: bool) -> None:
    keeper = make(every=1, keep_last=2, keep_best="eval/accuracy", asynchronous=asynchronous)
    run(keeper, {1: 0.5, 2: 0.8, 3: 0.7, 4: 0.1, 5: 0.2})
    assert kept(tmp_path) == [2, 4, 5]
    run(keeper, {6: 0.8, 7: float("nan"), 8: 0.79})
    assert kept(tmp_path) == [2, 7, 8]
    run(keeper, {9: 0.9, 10: 0.0, 11: 0.0})
    # Superseded: nothing keeps it any more.
    assert kept(tmp_path) == [9, 10, 11]
    assert open_verified(LocalStorage(tmp_path), "step-00000011", World()).training["best"]["step"] == 9


@both
def test_the_best_stays_when_a_better_one_cannot_be_saved(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    Broken(monkeypatch, 4)
    settings = {"keep_last": 1, "keep_best": "eval/accuracy", "on_save_error": "warn"}
    keeper = make(every=1, asynchronous=asynchronous, **settings)
    run(keeper, {1: 0.5, 2: 0.8, 3: 0.7, 4: 0.9, 5: 0.1, 6: 0.2})
    assert kept(tmp_path) == [2, 6]
    # A run that goes on from here keeps it too.
    best = open_verified(LocalStorage(tmp_path), "step-00000006", World()).training["best"]
    assert best == {"metric": "accuracy", "value": 0.8, "step": 2, "which": "auto"} == keeper.best
    run(keeper, {7: 0.85, 8: 0.1})
    assert kept(tmp_path) == [7, 8]


@both
def test_nothing_is_deleted_after_a_save_that_does_not_verify(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    keeper = make(every=1, keep_last=1, asynchronous=asynchronous)
    keeper.save(1, {}, STREAMS)
    # What is written in the background looks its function up there.
    keeper.close()

    def write(storage: Any, content: Any, world: World, **more: Any) -> str:
        name = write_checkpoint(storage, content, world, **more)
        damage(tmp_path / name)
        return name

    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    with pytest.raises(CheckpointError, match=r"step-00000002/shard-.* is damaged.*no older checkpoint was deleted"):
        keeper.save(2, {}, STREAMS)
        keeper.close()
    assert kept(tmp_path) == [1, 2]
    found = newest(LocalStorage(tmp_path), World())
    assert found is not None and found.name == "step-00000001"


def state(engine: Any) -> dict[Any, torch.Tensor]:
    return {(i.kind, i.name, i.state): i.tensor.clone() for i in engine.state()}


def test_a_background_save_holds_what_was_when_it_began(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = make(every=1, asynchronous=True)
    engine, gate = keeper._engine, threading.Event()

    def write(*args: Any, **more: Any) -> str:
        assert gate.wait(20)
        return write_checkpoint(*args, **more)

    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    training = {"list": [1, 2], "mapping": {"a": [1]}}
    before = state(engine)
    keeper.save(1, training, STREAMS)
    training["list"].append(3)
    training["mapping"]["a"].append(3)
    step(engine, 3)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.fill_(7)
    for group in engine.optimizer.param_groups:
        group["lr"] = 99.0
    assert kept(tmp_path) == []
    gate.set()
    keeper.close()
    manifest = open_verified(LocalStorage(tmp_path), "step-00000001", World())
    source = source_of(LocalStorage(tmp_path), "step-00000001", manifest)
    assert manifest.training == {"list": [1, 2], "mapping": {"a": [1]}}
    assert manifest.groups[0]["options"]["lr"] == 0.1
    assert {key: n["step"]["!tensor"][1] for key, n in manifest.numbers.items()} == dict.fromkeys(manifest.numbers, 1.0)
    for key, tensor in before.items():
        assert torch.equal(whole(source, key).view(-1), tensor), key


def test_one_background_save_at_a_time(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = [0], [0]

    def write(*args: Any, **more: Any) -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        name = write_checkpoint(*args, **more)
        running[0] -= 1
        return name

    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    keeper = make(every=1, asynchronous=True, keep_last=None)
    for number in range(1, 9):
        keeper.save(number, {"step": number}, STREAMS)
        step(keeper._engine)
    keeper.close()
    assert most[0] == 1 and kept(tmp_path) == list(range(1, 9))
    for number, name in steps(LocalStorage(tmp_path)):
        manifest = open_verified(LocalStorage(tmp_path), name, World())
        assert manifest.training["step"] == number == next(iter(manifest.numbers.values()))["step"]["!tensor"][1]


@pytest.mark.parametrize("where", ["next save", "close"])
def test_a_failure_in_the_background_is_told(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    Broken(monkeypatch, 2)
    keeper = make(every=1, asynchronous=True)
    for number in (1, 2):
        assert keeper.save(number, {}, STREAMS)
    with pytest.raises(CheckpointError, match="no room for 2"):
        keeper.save(3, {}, STREAMS) if where == "next save" else keeper.close()
    # Told once; the next one is saved.
    keeper.close()
    keeper.save(4, {}, STREAMS)
    keeper.close()
    assert kept(tmp_path) == [1, 4]


@both
def test_a_failure_can_be_a_warning(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    Broken(monkeypatch, 2)
    keeper = make(every=1, asynchronous=asynchronous, on_save_error="warn")
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            keeper.save(number, {}, STREAMS)
        keeper.close()
    assert caplog.text.count("no room for 2 (checkpoint.on_save_error=warn: training does not end)") == 1
    assert kept(tmp_path) == [1, 3]


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_peer_that_goes_during_a_save_in_the_background_is_told_as_that(
    make: Any, monkeypatch: pytest.MonkeyPatch, on_save_error: str
) -> None:
    gone = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:22403: Connection reset by peer.")

    def write(*args: Any, **more: Any) -> str:
        raise gone

    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    keeper = make(every=1, asynchronous=True, on_save_error=on_save_error)
    keeper.save(1, {}, STREAMS)
    with pytest.raises(RuntimeError) as caught:
        keeper.close()
    # As its own error it would be taken for the cause: the peer's end is.
    assert caught.value is gone and is_consequence(caught.value)


def test_no_memory_for_the_copy_is_an_error_like_any_other(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = make(every=1, asynchronous=True)
    keeper.save(1, {}, STREAMS)
    keeper.close()
    take = keeper._background._snapshot.take

    def fail(parts: Any) -> Any:
        raise MemoryError("40 GiB")

    monkeypatch.setattr(keeper._background._snapshot, "take", fail)
    with pytest.raises(CheckpointError, match="step 2 was not saved: MemoryError: 40 GiB"):
        keeper.save(2, {}, STREAMS)
    monkeypatch.setattr(keeper._background._snapshot, "take", take)
    keeper.save(3, {}, STREAMS)
    keeper.close()
    assert kept(tmp_path) == [1, 3]


def test_two_saves_in_a_row_are_the_same_bytes_and_change_nothing(make: Any, tmp_path: Path) -> None:
    keeper = make(every=1, keep_last=None)
    engine = keeper._engine

    def everything() -> str:
        digest = hashlib.sha256(read_streams(torch.device("cpu")) + repr(engine.scalars()).encode())
        for tensor in [*engine.model.state_dict().values(), *(i.tensor for i in engine.state())]:
            digest.update(tensor.numpy().tobytes())
        for group in engine.optimizer.param_groups:
            digest.update(repr({key: value for key, value in group.items() if key != "params"}).encode())
        return digest.hexdigest()

    before = everything()
    for number in (1, 2):
        keeper.save(number, {}, STREAMS)
    assert everything() == before
    one, two = ((tmp_path / f"step-0000000{n}" / "shard-00000-of-00001.safetensors").read_bytes() for n in (1, 2))
    assert one == two and len(one) > 500


def test_a_folder_that_vanished_is_made_again(make: Any, tmp_path: Path) -> None:
    import shutil

    keeper = make(every=1)
    keeper.save(1, {}, STREAMS)
    shutil.rmtree(tmp_path)
    keeper.save(2, {}, STREAMS)
    assert kept(tmp_path) == [2]
    open_verified(LocalStorage(tmp_path), "step-00000002", World())


@both
def test_a_place_that_is_a_file_is_an_error(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "file").write_text("")
    keeper = Keeper(
        open_engine(), LocalStorage(tmp_path / "file" / "run"), Checkpoint(every=1, asynchronous=asynchronous)
    )
    with pytest.raises(CheckpointError, match=r"file/run/step-00000001 was not saved: Not a directory"):
        keeper.save(1, {}, STREAMS)
        keeper.close()
