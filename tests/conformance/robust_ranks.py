"""What a rank does where checkpoints meet trouble: one of several that fails, is killed, or sees another disk."""

from __future__ import annotations

import errno
import functools
import hashlib
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.checkpoint.history import steps
from shardkit.checkpoint.keeper import Keeper
from shardkit.checkpoint.manifest import dump, read
from shardkit.checkpoint.resume import find, resume_from
from shardkit.checkpoint.storage import LocalStorage, open_storage
from shardkit.checkpoint.training import Position, training_state
from shardkit.checkpoint.verification import open_verified
from shardkit.data.order import GlobalOrder
from shardkit.errors import CheckpointError
from shardkit.recipe.schema import Checkpoint
from shardkit.seeds import read_streams
from shardkit.world import World

ORDER = GlobalOrder(num_items=10**6, global_batch_size=4, seed=0, shuffle=False, drop_last=True)
FAULTY = 1
# The rank that meets the trouble.


class Sum(nn.Module):
    """Each element's gradient is 1: after n steps with momentum 1 it is -n(n+1)/2, and its momentum n."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Elements(size), Elements(37)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


class Elements(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def total(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


class Total:
    def __call__(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return total(model, batch)

    def count(self, batch: torch.Tensor) -> int:
        return len(batch)

    def metrics(self, model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": total(model, batch)}


def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1.0, momentum=1.0)


def open_sum(backend: Any, size: int = 4099) -> Any:
    torch.manual_seed(0)
    return shardkit.open_engine(backend, Sum(size), momentum, blocks=["blocks.*"], micro_batch_size=2)


def step(engine: Any, times: int = 1) -> None:
    for _ in range(times):
        shardkit.train_step(engine, [torch.zeros(4 // engine.world.size)], Total())


class Run:
    """A run with a keeper, as the loop has one."""

    def __init__(self, backend: Any, folder: str, size: int = 4099, **settings: Any) -> None:
        self.engine, self.storage = open_sum(backend, size), open_storage(folder)
        self.keeper = Keeper(self.engine, self.storage, Checkpoint(every=1, **settings))
        self.position = Position()

    def resume(self, how: str = "auto") -> None:
        found = find(how, self.storage, self.engine.world)
        if found is not None:
            self.position = resume_from(
                found,
                self.engine,
                own=self.storage,
                order=ORDER,
                scheduler=None,
                choice=_choice(),
                seed=0,
                world=self.engine.world,
            ).position

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            step(self.engine)
            self.position = self.position.after(ORDER)

    def save(self) -> bool:
        world = self.engine.world
        training = training_state(
            self.position,
            ORDER,
            scheduler=None,
            normalization=self.engine.norms.applied.to_json(),
            seed=0,
            world_size=world.size,
            best=self.keeper.best,
            recipe={},
        )
        return self.keeper.save(self.position.step, training, read_streams(world.device))


def _choice() -> Any:
    from shardkit.checkpoint.restore import Choice

    return Choice()


def storm(backend: Any, folder: str, journal: str, asynchronous: bool, size: int) -> None:
    """Go on from the newest checkpoint and save after every step, until this process is killed."""
    run = Run(backend, folder, size, asynchronous=asynchronous, keep_last=3)
    run.resume()
    note = Path(journal).open("a", buffering=1) if run.engine.world.rank == 0 else None  # noqa: SIM115
    if note:
        note.write(f"resumed {run.position.step}\n")
    while True:
        run.step()
        saved = run.position.step
        run.save()
        if note and not asynchronous:
            note.write(f"saved {saved}\n")


# Trouble on one rank.


def trouble(backend: Any, folder: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Three saves, the second with trouble on one rank; what each did, and what there was afterwards."""
    run = Run(backend, folder, keep_last=1, **settings)
    world, result = run.engine.world, {"errors": [], "seconds": [], "names": []}
    for number in range(3):
        run.step()
        begun, why = time.monotonic(), ""
        with TROUBLES[kind](folder) if number == 1 and world.rank == fault_rank(kind) else nothing():
            try:
                run.save()
                run.keeper.close()
            except CheckpointError as error:
                why = str(error)
        result["errors"].append(why)
        result["seconds"].append(time.monotonic() - begun)
        world.barrier()
        result["names"].append(open_storage(folder).names())
        if number == 1:
            result["digest"] = digest_of(Path(folder) / "step-00000001")
        elif number == 0:
            result["before"] = digest_of(Path(folder) / "step-00000001")
    result["verified"] = [open_verified(run.storage, name, world).step for _, name in steps(run.storage)]
    return result


def digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fault_rank(kind: str) -> int:
    """Some things only rank 0 does."""
    return 0 if kind in ("commit", "publish", "retire", "remove", "staging", "listing") else FAULTY


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def raising(owner: Any, name: str, error: BaseException, when: str = "") -> Any:
    """A function that fails, where `when` is in its arguments."""

    def make(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if when in " ".join(map(str, args)):
                raise error
            return real(*args, **kwargs)

        return call

    return replaced(owner, name, make)


@contextmanager
def file_limit(_: str) -> Iterator[None]:
    """Files of this process end at 20 kB, less than a shard."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(_: str) -> Any:
    """The disk is full after the first piece."""
    from shardkit.checkpoint import shard

    return raising(shard, "write_tensor", OSError(errno.ENOSPC, "No space left on device"))


def read_only(folder: str) -> Any:
    error = OSError(errno.EROFS, "Read-only file system", folder)

    def make(real: Any) -> Any:
        def call(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "w" in mode and str(self).startswith(folder):
                raise error
            return real(self, mode, *args, **kwargs)

        return call

    return replaced(Path, "open", make)


def _in(module: str, name: str, error: BaseException, when: str = "") -> Callable[[str], Any]:
    import importlib

    return lambda _: raising(importlib.import_module(f"shardkit.checkpoint.{module}"), name, error, when)


def _of_storage(name: str, error: BaseException, when: str = "") -> Callable[[str], Any]:
    return lambda _: raising(LocalStorage, name, error, when)


TROUBLES: dict[str, Callable[[str], Any]] = {
    "limit": file_limit,
    "full": full,
    "read-only": read_only,
    "look": _in("save", "own_parts", ValueError("no view of that")),
    "staging": _of_storage("staging", OSError(errno.EIO, "Input/output error")),
    "write_shard": _in("save", "write_shard", RuntimeError("of the writer")),
    "memory": _in("save", "write_shard", MemoryError("of the writer")),
    "commit": _in("save", "_commit", ValueError("of the commit")),
    "publish": _of_storage("publish", OSError(errno.EIO, "Input/output error")),
    "retire": _of_storage("remove", OSError(errno.EACCES, "Permission denied"), "step-00000001"),
    "nothing": lambda _: nothing(),
    "listing": _of_storage("names", OSError(errno.EIO, "Input/output error")),
}


def apart(backend: Any, folder: str) -> dict[str, Any]:
    """Each rank has a disk of its own under the same name."""
    world = World.current()
    run = Run(backend, f"{folder}/{world.rank}")
    run.storage.root = folder
    run.step()
    result = {"save": told(run.save), "names": run.storage.names()}
    # Each sees a checkpoint there, and they differ in one value.
    shardkit.save_checkpoint(run.engine, f"{folder}/both", step=1)
    own = Path(f"{folder}/alone-{world.rank}/step-00000001")
    shutil.copytree(f"{folder}/both/step-00000001", own)
    manifest = read(LocalStorage(own.parent), own.name)
    (own / "manifest.json").write_bytes(dump(replace(manifest, training={"by": world.rank})))
    alone = LocalStorage(own.parent)
    alone.root = folder
    return {**result, "load": told(lambda: open_verified(alone, own.name, world))}


def told(action: Callable[[], Any]) -> tuple[str, float]:
    """Why it failed with a CheckpointError, and after how long."""
    begun = time.monotonic()
    try:
        action()
    except CheckpointError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


def load_trouble(backend: Any, folder: str) -> dict[str, tuple[str, float]]:
    """A failure of one rank in each phase of a load, then one without."""
    from shardkit.checkpoint import manifest, restore, source, verification

    run = Run(backend, folder)
    run.step(2)
    run.save()
    path = f"{folder}/step-00000002"
    faulty, results = run.engine.world.rank == FAULTY, {}
    io = OSError(errno.EIO, "Input/output error", "x")
    phases = {
        "manifest": raising(manifest, "read_bytes", io),
        "verify": raising(verification, "verify_file", io),
        "match": raising(restore, "_match", ValueError("no match")),
        "optimizer": raising(restore, "_optimizer", ValueError("no match")),
        "allocate": raising(type(run.engine), "load_state", MemoryError("of the state")),
        "read": raising(source.Source, "read", io),
        "streams": raising(torch, "set_rng_state", RuntimeError("no such state")),
        "nothing": nothing(),
    }
    for phase, context in phases.items():
        # A load that failed while it read leaves an engine with which nothing can be done.
        engine = open_sum(backend)
        with context if faulty else nothing():
            results[phase] = told(functools.partial(shardkit.load_checkpoint, engine, path))
    step(engine)  # type: ignore[possibly-undefined]
    results["after"] = [i.tensor.flatten()[:1].tolist() for i in engine.state() if i.tensor.numel()]  # type: ignore
    return results


def first_step(backend: Any, folder: str) -> dict[str, Any]:
    """Saved before the first step, and resumed; a save reads and changes nothing."""
    run = Run(backend, folder, keep_last=None)
    before = fingerprint(run.engine)
    run.save()
    after = fingerprint(run.engine)
    other = Run(backend, folder)
    other.resume()
    position = other.position.step
    for each in (run, other):
        each.step(3)
    same = all(torch.equal(a.tensor, b.tensor) for a, b in zip(run.engine.state(), other.engine.state(), strict=True))
    middle = fingerprint(run.engine)
    run.save()
    shardkit.save_checkpoint(run.engine, folder + "-again", step=3)
    return {
        "reading changed nothing": before == after and middle == fingerprint(run.engine),
        "position": position,
        "same": same,
        "elements": sum(i.tensor.numel() for i in run.engine.state()),
    }


def fingerprint(engine: Any) -> str:
    """All that lives: weights, gradients, moments and their numbers, options, random streams."""
    digest = hashlib.sha256(read_streams(engine.world.device))
    digest.update(repr([{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]).encode())
    digest.update(repr(sorted(engine.scalars().items())).encode())
    for name, tensor in engine.model.state_dict().items():
        local = getattr(tensor, "_local_tensor", tensor)
        digest.update(name.encode() + local.detach().float().numpy().tobytes())
    for state in engine.optimizer.state.values():
        for key, value in state.items():
            local = getattr(value, "_local_tensor", value)
            digest.update(
                key.encode() + (local.numpy().tobytes() if isinstance(local, torch.Tensor) else repr(local).encode())
            )
    for interval in engine.state():
        digest.update(interval.tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def meanwhile(backend: Any, folder: str, windows: int) -> dict[str, Any]:
    """Losses and weights of a run with collectives all the time, without saves and with one after every step."""
    from tests.conformance.checkpoint_ranks import open_run, train

    results = {}
    for saves in (False, True):
        engine, scheduler = open_run(backend, seed=3)
        keeper = Keeper(engine, open_storage(folder), Checkpoint(every=1, asynchronous=True, keep_last=2))
        losses = []
        for window in range(windows):
            losses += train(engine, scheduler, range(window, window + 1))
            if saves:
                keeper.save(window + 1, {"window": window}, read_streams(engine.world.device))
        keeper.close()
        results[saves] = (losses, [i.tensor.clone() for i in engine.state() if i.kind != "buffer"])
    (plain, one), (saved, two) = results[False], results[True]
    return {
        "losses": plain,
        "same": plain == saved and all(torch.equal(a, b) for a, b in zip(one, two, strict=True)),
        "names": open_storage(folder).names(),
    }


def elsewhere(backend: Any, url: str) -> dict[str, Any]:
    """A run whose checkpoints are at a URL."""
    run = Run(backend, url, keep_last=2, export=True)
    for _ in range(4):
        run.step()
        run.save()
    names = run.storage.names()
    other = Run(backend, url)
    if run.engine.world.rank == 0:
        run.storage.remove("step-00000004/manifest.json")
    run.engine.world.barrier()
    other.resume()
    cleaned = run.storage.names()
    other.step()
    other.save()
    # Again the same step: put in the place of the one that is there.
    shardkit.save_checkpoint(other.engine, url, step=4)
    value = [float(i.tensor.flatten()[0]) for i in other.engine.state() if i.kind == "parameter" and i.tensor.numel()]
    run.engine.world.barrier()
    return {
        "names": names,
        "cleaned": cleaned,
        "position": other.position.step,
        "value": set(value),
        "end": run.storage.names(),
        "kind": type(run.storage).__name__,
        "verified": open_verified(run.storage, "step-00000004", run.engine.world).step,
    }
