"""Weights to start from: every kind of place, and what is said of those that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from shardkit.checkpoint.convert import Options, convert
from shardkit.checkpoint.export import whole
from shardkit.checkpoint.source import Source
from shardkit.checkpoint.weights import open_weights
from shardkit.errors import CheckpointError, RequestError
from tests.unit.checkpoint.nets import trained

Save = Callable[..., Path]


def same(source: Source, seed: int = 0, steps: int = 3) -> bool:
    state = trained(steps, seed)[0].state_dict()
    return all(
        any(
            torch.equal(whole(source, (kind, name, None)), tensor)
            for kind in ("parameter", "buffer")
            if source.find((kind, name, None))
        )
        for name, tensor in state.items()
    )


def test_a_checkpoint_offers_its_weights_alone(save: Save) -> None:
    source = open_weights(str(save()))
    assert same(source) and {key[0] for key in source.entries} == {"parameter", "buffer"}


def test_of_a_run_the_newest_that_is_whole(save: Save, tmp_path: Path) -> None:
    save(3, root="run/checkpoints")
    broken = save(4, root="run/checkpoints")
    next(broken.glob("shard-*")).write_bytes(b"short")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert same(open_weights(str(path)))


def test_a_file_and_folders_of_them(save: Save, tmp_path: Path) -> None:
    checkpoint = str(save())
    single = convert(checkpoint, str(tmp_path / "net.safetensors"), Options())
    folder = convert(checkpoint, str(tmp_path / "hf"), Options())
    shards = convert(checkpoint, str(tmp_path / "shards"), Options(max_shard_size=200))
    for path in (single, folder, shards, f"{shards}/model.safetensors.index.json"):
        assert same(open_weights(path)), path


def test_urls(save: Save, tmp_path: Path) -> None:
    shards = Path(convert(str(save()), str(tmp_path / "shards"), Options(max_shard_size=200)))
    memory = fsspec.filesystem("memory")
    for file in shards.iterdir():
        memory.pipe_file(f"/weights/{file.name}", file.read_bytes())
    assert same(open_weights("memory://weights"))
    out = convert(str(tmp_path / "checkpoints"), "memory://out/net.safetensors", Options())
    assert same(open_weights(out))
    assert memory.ls("/out", detail=False) == ["/out/net.safetensors"]


def test_paths_are_relative_to_the_working_directory(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save()
    monkeypatch.chdir(checkpoint)
    assert same(open_weights(".")) and same(open_weights(".."))
    monkeypatch.chdir(checkpoint.parent)
    assert same(open_weights(checkpoint.name)) and same(open_weights(f"./{checkpoint.name}/"))


def test_a_missing_shard_is_named(save: Save, tmp_path: Path) -> None:
    shards = Path(convert(str(save()), str(tmp_path / "shards"), Options(max_shard_size=200)))
    (shards / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards lacks model-00002-of-00004\.safetensors"):
        open_weights(str(shards))


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected safetensors files beside it"):
        open_weights(str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, (20).to_bytes(8, "little") + b"{" * 20])
def test_a_damaged_header_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_weights(str(tmp_path))


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(64)}, tmp_path / "net.safetensors")
    (tmp_path / "net.safetensors").write_bytes((tmp_path / "net.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"net\.safetensors: w lies outside the file; it was cut off"):
        open_weights(str(tmp_path / "net.safetensors"))


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(RequestError, match=r"pytorch_model\.bin is a pickle.*convert it with safetensors"):
            open_weights(str(path))


def test_what_is_there_instead_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RequestError, match=r"holds notes\.txt"):
        open_weights(str(tmp_path))
    with pytest.raises(RequestError, match=r"absent is no shardkit checkpoint .*there is no such path; .* holds notes"):
        open_weights(str(tmp_path / "absent"))
    with pytest.raises(RequestError, match=r"absent\.safetensors is not there: there is no such path"):
        open_weights(str(tmp_path / "absent.safetensors"))
    with pytest.raises(RequestError, match="nosuch"):
        open_weights("nosuch://bucket/model")
