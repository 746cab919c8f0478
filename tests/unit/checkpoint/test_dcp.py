"""DCP folders: read without opening more than plain data, and written so that torch loads them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from shardkit.checkpoint.convert import Options, convert
from shardkit.checkpoint.difference import difference
from shardkit.checkpoint.encoding import decode
from shardkit.checkpoint.export import whole
from shardkit.checkpoint.place import one
from shardkit.checkpoint.restore import Choice, restore
from shardkit.checkpoint.source import source_of
from shardkit.errors import CheckpointError, RequestError
from tests.unit.checkpoint.nets import Net, optimizer_of, trained

Save = Callable[..., Path]


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class App(Stateful):
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def dcp_save(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def taken(engine: Any, net: Net, flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    return get_state_dict(net, engine.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


@pytest.mark.parametrize("layout", ["nested", "flat", "app", "torchtitan"])
def test_common_layouts_become_the_checkpoint_shardkit_would_have_saved(
    save: Save, tmp_path: Path, layout: str
) -> None:
    net, engine = trained()
    model, optimizer = taken(engine, net, flat=layout in ("flat", "torchtitan"))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 2, "rng": torch.get_rng_state()}
    if layout == "app":
        state = {"app": App({"model": model, "optimizer": optimizer})}
    if layout == "torchtitan":
        state = {**model, "optimizer": App(optimizer)}
    out = convert(str(dcp_save(state, tmp_path / "dcp")), str(tmp_path / "out"), Options())
    assert Path(out).name == "step-00000003"
    found = difference(one(out), one(str(save())))
    assert not found.tensors and not found.numbers and not found.groups
    # DCP does not know that they are tied.
    assert found.only_a == [("weight", "head.weight", None)] and not found.only_b
    assert one(out).manifest().backend == "torch-dcp"


def test_columns_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """Blocks that do not span whole rows, in two files, as Shard(1) leaves them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    full = torch.arange(35.0).view(5, 7)
    folder = tmp_path / "dcp"
    folder.mkdir()
    chunks, places = [], {}
    for rank, (start, stop) in enumerate([(0, 4), (4, 7)]):
        block = full[:, start:stop].contiguous()
        torch.save(block, folder / f"__{rank}_0.distcp")
        offset = torch.Size([0, start])
        chunks.append(ChunkStorageMetadata(offset, block.shape))
        size = (folder / f"__{rank}_0.distcp").stat().st_size
        places[MetadataIndex("model.w", offset)] = _StorageInfo(f"__{rank}_0.distcp", 0, size)
    said = TensorStorageMetadata(TensorProperties(), full.shape, chunks)
    metadata = Metadata({"model.w": said}, planner_data={"model.w": ("model", "w")}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    place = one(convert(str(folder), str(tmp_path / "out"), Options(step=4)))
    manifest = place.manifest()
    assert manifest.world_size == 2 and manifest.step == 4
    assert torch.equal(whole(source_of(place.storage, place.name, manifest), ("parameter", "w", None)), full)


def test_a_payload_in_the_metadata_never_runs(tmp_path: Path) -> None:
    folder = dcp_save({"model": {"w": torch.ones(3)}}, tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["more"] = Payload(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RequestError, match=r"\.metadata holds more than plain data .*touch.*--trust"):
        convert(str(folder), str(tmp_path / "out"), Options(step=1))
    assert not (tmp_path / "out").exists()
    convert(str(folder), str(tmp_path / "out"), Options(step=1, trust=True))
    assert not (tmp_path / "ran").exists()


def test_a_payload_in_a_value_never_runs(tmp_path: Path) -> None:
    net, engine = trained()
    model, optimizer = taken(engine, net)
    optimizer["param_groups"][0]["hook"] = Payload(tmp_path / "ran")
    folder = dcp_save({"model": model, "optimizer": optimizer, "other": Payload(tmp_path / "ran")}, tmp_path / "dcp")
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(RequestError, match="distcp holds more than plain data"):
        convert(str(folder), str(tmp_path / "out"), Options())
    assert not (tmp_path / "ran").exists() and not list(tmp_path.glob(".tmp-*"))
    said: list[str] = []
    # What is not needed is left unopened.
    convert(str(folder), str(tmp_path / "out"), Options(trust=True), said.append)
    assert said == ["not taken over: other"] and not (tmp_path / "ran").exists()


def test_torch_loads_what_is_written(save: Save, tmp_path: Path) -> None:
    out = convert(str(save()), str(tmp_path / "dcp"), Options(to="dcp"))
    net = Net(seed=5)
    optimizer = optimizer_of([(n, p) for n, p in net.named_parameters() if p.requires_grad])
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=out, no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected, engine = trained()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, net.state_dict()[name]), name
    for (_, p), (_, q) in zip(net.named_parameters(), expected.named_parameters(), strict=True):
        for key, value in engine.optimizer.state.get(q, {}).items():
            assert torch.equal(value, optimizer.state[p][key]), key
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert [g["lr"] for g in optimizer.param_groups] == [1e-2, 3e-3]


def test_there_and_back_is_the_same(save: Save, tmp_path: Path) -> None:
    back = convert(convert(str(save()), str(tmp_path / "dcp"), Options(to="dcp")), str(tmp_path / "out"), Options())
    found = difference(one(back), one(str(save())))
    assert not (found.tensors or found.numbers or found.groups or found.only_b)
    numbers = decode(one(back).manifest().numbers["body.weight"])
    assert torch.equal(numbers["step"], torch.tensor(3.0))


def test_a_missing_file_is_named(save: Save, tmp_path: Path) -> None:
    out = Path(convert(str(save()), str(tmp_path / "dcp"), Options(to="dcp")))
    next(out.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is not there"):
        convert(str(out), str(tmp_path / "out"), Options())
    assert not list(tmp_path.glob(".tmp-*")) and not (tmp_path / "out").exists()


def test_it_goes_to_a_file_at_once(save: Save, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = convert(str(save()), str(tmp_path / "dcp"), Options(to="dcp"))
    tensors = load_file(convert(folder, str(tmp_path / "net.safetensors"), Options()))
    assert torch.equal(tensors["body.weight"], trained()[0].body.weight)


def test_an_engine_takes_up_what_was_imported(tmp_path: Path) -> None:
    """Names, tied names, groups and the optimizer's numbers all fit, and the next step is the same."""
    net, engine = trained()
    model, optimizer = taken(engine, net)
    place = one(
        convert(
            str(dcp_save({"model": model, "optimizer": optimizer}, tmp_path / "dcp")), str(tmp_path / "o"), Options()
        )
    )
    other, target = trained(1, seed=4)
    manifest = place.manifest()
    restore(target, source_of(place.storage, place.name, manifest), manifest, Choice(), target.world)
    for each, its in ((engine, net), (target, other)):
        torch.manual_seed(7)
        each.backward(its(torch.randn(6, 5)).square().mean())
        each.step()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
