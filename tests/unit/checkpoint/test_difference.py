"""diff: what is told of two checkpoints, and what is not a difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.difference import Difference, as_json, as_text, difference
from shardkit.checkpoint.manifest import Entry, Key, Manifest, dump
from shardkit.checkpoint.place import Place, one
from shardkit.checkpoint.shard import Part, write_shard
from shardkit.checkpoint.storage import open_storage
from shardkit.checkpoint.tensors import dtype_name

Save = Callable[..., Path]


def written(folder: Path, tensors: dict[Key, torch.Tensor], cut: int | None = None, **more: Any) -> Place:
    """A checkpoint of these tensors, each in pieces of `cut` elements, as many ranks would write them."""
    storage = open_storage(str(folder))
    storage.make("step-00000001")
    parts = [
        Part(key=key, shape=tuple(t.shape), dtype=dtype_name(t.dtype), start=start, tensor=piece)
        for key, t in tensors.items()
        for start, piece in _cut(t.reshape(-1), cut or max(1, t.numel()))
    ]
    done, file = write_shard(storage, "step-00000001", "shard-00000-of-00001.safetensors", parts)
    entries = {
        key: Entry(
            shape=tuple(t.shape),
            dtype=dtype_name(t.dtype),
            chunks=tuple(each.chunk for each in done if each.key == key),
        )
        for key, t in tensors.items()
    }
    manifest = Manifest(
        step=1,
        created="2026-01-01T00:00:00Z",
        backend="single",
        world_size=1,
        versions={},
        files={"shard-00000-of-00001.safetensors": file},
        entries=entries,
    )
    with storage.create("step-00000001/manifest.json") as out:
        out.write(dump(replace(manifest, **more)))
    return Place(storage=storage, name="step-00000001")


def _cut(flat: torch.Tensor, size: int) -> list[tuple[int, torch.Tensor]]:
    return [(start, flat[start : start + size]) for start in range(0, max(1, flat.numel()), size)]


def compared(a: torch.Tensor, b: torch.Tensor, tmp_path: Path, tolerance: float = 0.0) -> Difference:
    key: Key = ("parameter", "w", None)
    return difference(written(tmp_path / "a", {key: a}), written(tmp_path / "b", {key: b}, cut=7), tolerance)


def test_equal_whatever_the_pieces(tmp_path: Path) -> None:
    tensor = torch.randn(300_001)
    found = compared(tensor, tensor.clone(), tmp_path)
    assert not found.any and found.compared == 1 and as_text(found, 0.0).startswith("equal: 1 tensors")


def test_the_largest_differences_are_told(tmp_path: Path) -> None:
    a = torch.ones(300_001)
    b = a.clone()
    b[5], b[300_000] = 1.5, 0.75
    found = compared(a, b, tmp_path)
    [tensor] = found.tensors
    assert (tensor.absolute, tensor.elements) == (0.5, 2) and math.isclose(tensor.relative, 1 / 3)
    assert not compared(a, b, tmp_path / "more", 0.5).any
    [close] = compared(a, b, tmp_path / "less", 0.3).tensors
    assert close.elements == 1
    assert "w" in as_text(found, 0.0) and as_json(found, 0.0)["tensors"][0]["elements"] == 2


def test_nan_infinity_and_large_integers(tmp_path: Path) -> None:
    a = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    assert not compared(a, a.clone(), tmp_path / "1").any
    [found] = compared(a, torch.tensor([math.nan, math.inf, math.inf, -0.0]), tmp_path / "2").tensors
    assert found.absolute == math.inf and found.elements == 1
    [found] = compared(torch.tensor([1.0]), torch.tensor([math.nan]), tmp_path / "3").tensors
    assert found.absolute == math.inf
    [found] = compared(torch.tensor([2**60]), torch.tensor([2**60 + 1]), tmp_path / "4").tensors
    assert found.elements == 1


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    [found] = compared(torch.ones(6), torch.ones(2, 3), tmp_path / "1").tensors
    assert found.why == "[6] in A, [2, 3] in B"
    [found] = compared(torch.ones(6), torch.ones(6, dtype=torch.bfloat16), tmp_path / "2").tensors
    assert found.why == "F32 in A, BF16 in B" and found.elements == 0
    assert not compared(torch.ones(6), torch.ones(6, dtype=torch.bfloat16), tmp_path / "3", 1e-6).any


def test_tied_names_are_one_tensor(tmp_path: Path) -> None:
    a = written(tmp_path / "a", {("parameter", "embed", None): torch.ones(3)}, aliases={"head": "embed"})
    b = written(tmp_path / "b", {("parameter", "head", None): torch.ones(3)}, aliases={"embed": "head"})
    assert not difference(a, b).any


def test_names_groups_numbers_and_position(save: Save) -> None:
    first, second = one(str(save(3))), one(str(save(4)))
    found = difference(first, second)
    assert not found.only_a and not found.only_b and found.tensors
    assert found.numbers == ["step of embed.weight and 4 more: 3 in A, 4 in B"]
    assert found.training[0] == "step: 3 in A, 4 in B" and "samples: 18 in A, 24 in B" in found.training
    assert not difference(first, first).any
    manifest = first.manifest()
    group = {**manifest.groups[1], "options": {**manifest.groups[1]["options"], "lr": 0.5}}
    entries = {key: entry for key, entry in manifest.entries.items() if key[1] != "frozen"}
    changed = replace(manifest, groups=[manifest.groups[0], group], entries=entries)
    with first.storage.create(f"{first.name}/manifest.json") as file:
        file.write(dump(changed))
    again = difference(one(str(save(3, root="other"))), first)
    assert [key[1] for key in again.only_a] == ["frozen"]
    assert again.groups == ["norm.weight and 2 more: lr: 0.003 in A, 0.5 in B"]
    assert all(len(line) <= 100 for line in as_text(again, 0.0).splitlines())
