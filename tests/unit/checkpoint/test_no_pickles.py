"""Nothing in a checkpoint is ever run: there is no pickle on the way of a load, and planted ones stay what they are."""

from __future__ import annotations

import ast
import base64
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.errors import CheckpointError
from tests.unit.checkpoint.conftest import trained

PACKAGE = Path(shardkit.__file__).parent / "checkpoint"
# shardkit convert opens other libraries' pickles, with --trust and in a process of its own.
LOAD_PATH = sorted(path for path in PACKAGE.rglob("*.py") if "foreign" not in path.parts)
FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "runpy"}
CALLS = {"eval", "exec", "compile", "__import__", "import_module"}


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_the_payload_of_these_tests_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", LOAD_PATH, ids=lambda path: path.name)
def test_the_load_path_has_no_way_to_run_what_it_reads(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called in ("torch.load", "yaml.load", "np.load", "numpy.load", "torch.jit.load"):
                found.append(called)
    assert not found, f"{path.name}: {found}"


def test_there_is_a_load_path_to_look_at() -> None:
    assert {"restore.py", "resume.py", "manifest.py", "source.py", "encoding.py"} <= {path.name for path in LOAD_PATH}


def test_a_save_and_a_load_need_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was made or opened")

    class Refused:
        def __init__(self, *_: Any, **__: Any) -> None:
            refuse()

    _, engine = trained()
    _, other = trained(steps=1, seed=4)
    for name in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, Refused)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    shardkit.save_checkpoint(engine, tmp_path, step=3, training={"scheduler": {"last_epoch": 3}}, export=True)
    loaded = shardkit.load_checkpoint(other, tmp_path)
    assert loaded.step == 3 and loaded.training == {"scheduler": {"last_epoch": 3}}
    for one, two in zip(engine.state(), other.state(), strict=True):
        assert torch.equal(one.tensor, two.tensor)


def pickled(path: Path) -> bytes:
    return pickle.dumps(Payload(path))


def saved_by_torch(path: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"module": Payload(path)}, file)
    return file.getvalue()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    _, engine = trained()
    return Path(shardkit.save_checkpoint(engine, tmp_path / "checkpoints", step=3, export=True))


@pytest.mark.parametrize("make", [pickled, saved_by_torch])
@pytest.mark.parametrize("file", ["manifest.json", "shard-00000-of-00001.safetensors", "model.safetensors"])
def test_a_pickle_in_the_place_of_a_file_is_refused(saved: Path, tmp_path: Path, make: Any, file: str) -> None:
    (saved / file).write_bytes(make(tmp_path / "ran"))
    _, engine = trained(steps=1)
    with pytest.raises(CheckpointError, match=file):
        shardkit.load_checkpoint(engine, saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("make", [pickled, saved_by_torch])
def test_pickles_beside_the_files_are_left_alone(saved: Path, tmp_path: Path, make: Any) -> None:
    names = [".metadata", "extra.pt", "optimizer.bin", "pytorch_model.bin", "random_states_0.pkl", "scheduler.bin"]
    for name in [*names, "mp_rank_00_model_states.pt", "__0_0.distcp"]:
        (saved / name).write_bytes(make(tmp_path / "ran"))
    (saved.parent / "latest").write_bytes(make(tmp_path / "ran"))
    _, engine = trained(steps=1)
    assert shardkit.load_checkpoint(engine, saved.parent).step == 3
    assert not (tmp_path / "ran").exists()


def test_a_pickle_among_the_values_stays_a_text(tmp_path: Path) -> None:
    text = base64.b64encode(pickled(tmp_path / "ran")).decode()
    _, engine = trained()
    training = {"scheduler": {"state": text}, "own": {"__reduce__": text}, "raw": pickled(tmp_path / "r").hex()}
    shardkit.save_checkpoint(engine, tmp_path / "a", step=3, training=training)
    assert shardkit.load_checkpoint(engine, tmp_path / "a").training == training
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_a_pickle_are_refused(tmp_path: Path) -> None:
    from shardkit.checkpoint.weights import open_weights
    from shardkit.errors import ShardkitError

    for name in ("pytorch_model.bin", "model.safetensors", "model.pt"):
        (tmp_path / name).write_bytes(saved_by_torch(tmp_path / "ran"))
        with pytest.raises(ShardkitError):
            open_weights(str(tmp_path / name))
        with pytest.raises(ShardkitError):
            open_weights(str(tmp_path))
        (tmp_path / name).unlink()
    assert not (tmp_path / "ran").exists()
