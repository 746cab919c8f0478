"""Export: plain safetensors files that the bare model loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit.checkpoint.convert import Options, convert
from shardkit.errors import RequestError
from tests.unit.checkpoint.nets import Net, trained

Save = Callable[..., Path]


def same(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == tensors.keys() and all(torch.equal(state[name], tensors[name]) for name in state)


def test_the_bare_model_loads_the_file_with_every_name(save: Save, tmp_path: Path) -> None:
    out = convert(str(save()), str(tmp_path / "net.safetensors"), Options())
    tensors = load_file(out)
    net = Net(seed=9)
    net.load_state_dict(tensors, strict=True)
    assert same(trained()[0], tensors) and same(net, tensors)
    assert tensors["norm.num_batches_tracked"].shape == () and tensors["norm.num_batches_tracked"] == 3
    assert torch.equal(tensors["head.weight"], tensors["embed.weight"])


def test_parameters_are_cast_and_buffers_are_not(save: Save, tmp_path: Path) -> None:
    tensors = load_file(convert(str(save()), str(tmp_path / "net.safetensors"), Options(dtype=torch.bfloat16)))
    assert tensors["body.weight"].dtype == torch.bfloat16 and tensors["norm.running_mean"].dtype == torch.float32
    assert torch.equal(tensors["body.weight"], trained()[0].body.weight.detach().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("option", "given"), [("--step", Options(step=3)), ("--optimizer", Options(optimizer="torch.optim.SGD"))]
)
def test_options_for_other_libraries_are_refused(save: Save, tmp_path: Path, option: str, given: Options) -> None:
    with pytest.raises(RequestError, match=f"{option} is for checkpoints of other libraries; .* leave it out"):
        convert(str(save()), str(tmp_path / "net.safetensors"), given)
    assert not (tmp_path / "net.safetensors").exists()


def test_a_folder_in_shards_has_an_index(save: Save, tmp_path: Path) -> None:
    out = Path(convert(str(save()), str(tmp_path / "hf"), Options(max_shard_size=200)))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in set(index["weight_map"].values()):
        found = load_file(out / file)
        assert {name for name, home in index["weight_map"].items() if home == file} == set(found)
        tensors |= found
    assert same(trained()[0], tensors) and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert sorted(path.name for path in out.iterdir())[0] == "model-00001-of-00004.safetensors"


def test_a_small_folder_is_one_file(save: Save, tmp_path: Path) -> None:
    out = Path(convert(str(save()), str(tmp_path / "hf"), Options()))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert same(trained()[0], load_file(out / "model.safetensors"))


def test_nothing_is_overwritten(save: Save, tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").write_text("mine")
    with pytest.raises(RequestError, match="is there already, and nothing is overwritten"):
        convert(str(save()), str(tmp_path / "net.safetensors"), Options())
    assert (tmp_path / "net.safetensors").read_text() == "mine"


def test_a_large_model_takes_a_few_mib(tmp_path: Path) -> None:
    """64 MB of weights; the peak of the process is measured from before the export to after it."""
    program = """
import resource, sys, torch, shardkit
from shardkit.checkpoint.convert import Options, convert
from shardkit.checkpoint.manifest import Entry, Manifest, dump
from shardkit.checkpoint.shard import Part, write_shard
from shardkit.checkpoint.storage import open_storage
root = sys.argv[1]
storage = open_storage(root)
storage.make("step-00000001")
parts = [Part(key=("parameter", f"w{n}", None), shape=(2**20, 8), dtype="F32", start=0, tensor=torch.ones(2**23))
         for n in range(2)]
written, file = write_shard(storage, "step-00000001", "shard-00000-of-00001.safetensors", parts)
del parts
entries = {w.key: Entry(shape=w.shape, dtype=w.dtype, chunks=(w.chunk,)) for w in written}
manifest = Manifest(step=1, created="", backend="single", world_size=1, versions={},
                    files={"shard-00000-of-00001.safetensors": file}, entries=entries)
with storage.create("step-00000001/manifest.json") as out:
    out.write(dump(manifest))
def memory():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1])
import threading, time
convert(root, root + "/warm.safetensors", Options(dtype=torch.float16))
before = peak = memory()
done = threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, memory())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
convert(root, root + "/out.safetensors", Options(dtype=torch.float16))
done.set(); thread.join()
print(peak - before)
"""
    # What is freed goes back at once.
    given = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * 1024
