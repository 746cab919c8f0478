"""A checkpoint that is not what was written is refused with its file named, before anything live is touched."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.checkpoint.manifest import LARGEST, parse
from shardkit.checkpoint.storage import LocalStorage, open_storage
from shardkit.checkpoint.verification import open_verified, verify_files
from shardkit.errors import CheckpointError
from shardkit.world import World
from tests.unit.checkpoint.conftest import trained

FLIPS, CUTS, FUZZED = 1000, 200, 600
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with all kinds of files."""
    folder = tmp_path_factory.mktemp("saved")
    _, engine = trained()
    # Numbers and mappings of the kinds that schedulers keep.
    training = {"factors": (0.5, float("inf")), "milestones": {3: 1}, "scale": torch.ones(2)}
    return Path(shardkit.save_checkpoint(engine, folder, step=3, training=training, export=True))


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.fixture(scope="module")
def live() -> Any:
    return trained(steps=1, seed=5)[1]


@pytest.fixture(autouse=True)
def untouched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing in this module may change the engine that it loads into."""
    if "live" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("live")
    before = fingerprint(engine)
    yield
    assert fingerprint(engine) == before


def fingerprint(engine: Any) -> str:
    digest = hashlib.sha256(repr([group["lr"] for group in engine.optimizer.param_groups]).encode())
    for interval in engine.state():
        digest.update(interval.tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def refusal(path: Path) -> str:
    """Why it cannot be used; the test fails when it can, or when anything but a CheckpointError is raised."""
    with pytest.raises(CheckpointError) as caught:
        open_verified(LocalStorage(path.parent), path.name, World())
    return str(caught.value)


def sealed(body: dict[str, Any] | str) -> bytes:
    """A manifest with this body and the digest that fits it."""
    text = body if isinstance(body, str) else json.dumps(body)
    rest = text[1:].encode() if text.startswith("{") else text.encode()
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def body_of(path: Path) -> dict[str, Any]:
    body = json.loads((path / "manifest.json").read_bytes())
    del body["sha256"]
    return body


def test_the_undamaged_one_is_taken_and_so_is_a_sealed_copy(saved: Path, damaged: Path) -> None:
    names = {path.name for path in saved.iterdir()}
    assert names == {"manifest.json", "model.safetensors", "shard-00000-of-00001.safetensors"}
    (damaged / "manifest.json").write_bytes(sealed(body_of(damaged)))
    assert open_verified(LocalStorage(damaged.parent), damaged.name, World()).step == 3


def test_every_flipped_byte_is_found_and_its_file_named(damaged: Path) -> None:
    dice = random.Random(1)
    files = [path for path in sorted(damaged.iterdir()) for _ in range(FLIPS // 3 + 1)]
    for number, path in enumerate(files):
        whole = path.read_bytes()
        place = dice.randrange(len(whole)) if number % 7 else number % 3 * (len(whole) - 1) // 2
        changed = bytearray(whole)
        changed[place] ^= 1 << dice.randrange(8)
        path.write_bytes(changed)
        why = refusal(damaged)
        assert path.name in why and "damaged" in why, f"byte {place} of {path.name}: {why}"
        path.write_bytes(whole)


def test_every_cut_is_found_and_its_file_named(damaged: Path) -> None:
    dice = random.Random(2)
    files = [path for path in sorted(damaged.iterdir()) for _ in range(CUTS // 3 + 1)]
    for number, path in enumerate(files):
        whole = path.read_bytes()
        path.write_bytes(whole[: [0, len(whole) - 1, dice.randrange(len(whole))][number % 3]])
        assert path.name in refusal(damaged)
        # Sizes alone show it too, but for the manifest, which has its digest.
        with pytest.raises(CheckpointError, match=path.name):
            open_verified(LocalStorage(damaged.parent), damaged.name, World(), "size")
        path.write_bytes(whole + b"\0")
        assert path.name in refusal(damaged)
        path.write_bytes(whole)


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "shard-00000-of-00001.safetensors"])
def test_a_load_of_a_damaged_one_changes_nothing(damaged: Path, live: Any, file: str) -> None:
    whole = (damaged / file).read_bytes()
    (damaged / file).write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with pytest.raises(CheckpointError, match=file):
        shardkit.load_checkpoint(live, damaged)
    # The newest of a folder with this one alone is none.
    with pytest.raises(CheckpointError, match=file):
        shardkit.load_checkpoint(live, damaged.parent)


def test_a_shard_that_is_not_there_is_named(damaged: Path) -> None:
    (damaged / "shard-00000-of-00001.safetensors").unlink()
    assert "shard-00000-of-00001.safetensors is not there" in refusal(damaged)


def test_a_folder_without_a_manifest_is_no_checkpoint(damaged: Path) -> None:
    (damaged / "manifest.json").unlink()
    assert "manifest.json is not there, so this is no complete checkpoint" in refusal(damaged)


@pytest.mark.parametrize("file", ["manifest.json", "shard-00000-of-00001.safetensors"])
@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(damaged: Path, file: str, what: str) -> None:
    (damaged / file).unlink()
    make = {"folder": Path.mkdir, "pipe": os.mkfifo}[what]
    make(damaged / file)
    assert file in refusal(damaged)


def test_a_manifest_beyond_all_measure_is_not_read(damaged: Path) -> None:
    with (damaged / "manifest.json").open("wb") as file:
        file.truncate(LARGEST + 1)
    assert "more than any manifest" in refusal(damaged)


def test_all_damaged_files_are_named_at_once(damaged: Path) -> None:
    manifest = parse((damaged / "manifest.json").read_bytes(), "m")
    for name in manifest.files:
        (damaged / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        verify_files(LocalStorage(damaged.parent), damaged.name, manifest, manifest.files)
    assert all(name in str(caught.value) for name in manifest.files)


def tensor(body: dict[str, Any], numel_above: int = 1) -> dict[str, Any]:
    return next(t for t in body["tensors"] if len(t["shape"]) == 2 and t["chunks"][0][1] > numel_above)


def put(*path: Any, value: Any) -> Change:
    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


def doubled(body: dict[str, Any]) -> None:
    body["tensors"].append(copy.deepcopy(body["tensors"][0]))


def aimed(body: dict[str, Any]) -> None:
    """Two tensors of the same bytes: a small file that would become a big one."""
    copied = copy.deepcopy(tensor(body))
    body["tensors"].append({**copied, "name": "another"})


def chunked(*chunks: Any) -> Change:
    return lambda body: tensor(body).update(chunks=list(chunks))


def cut_in(change: Callable[[int, int, int], list[Any]]) -> Change:
    def apply(body: dict[str, Any]) -> None:
        (start, length, file, offset) = tensor(body)["chunks"][0]
        assert start == 0 and file == 0
        tensor(body)["chunks"] = change(length, file, offset)

    return apply


CLAIMS: dict[str, Change] = {
    "path-up": put("files", 0, "name", value="../x"),
    "path-absolute": put("files", 0, "name", value="/etc/passwd"),
    "path-hidden": put("files", 0, "name", value="a/../../x"),
    "path-zero": put("files", 0, "name", value="a\0b"),
    "path-lines": put("files", 0, "name", value="a\n"),
    "path-itself": put("files", 0, "name", value="manifest.json"),
    "path-number": put("files", 0, "name", value=7),
    "file-twice": lambda body: body["files"].append(dict(body["files"][0])),
    "file-negative": put("files", 0, "bytes", value=-1),
    "file-huge": put("files", 0, "bytes", value=2**62),
    "file-more": put("files", 0, "bytes", value=2**80),
    "file-none": put("files", 0, "bytes", value=None),
    "shape-negative": lambda body: tensor(body).update(shape=[-1, -35]),
    "shape-huge": lambda body: tensor(body).update(shape=[2**40, 2**40]),
    "shape-huge-empty": lambda body: tensor(body).update(shape=[0, 2**62], chunks=[]),
    "shape-empty": lambda body: tensor(body).update(shape=[0, 5]),
    "shape-real": lambda body: tensor(body).update(shape=[7.0, 5]),
    "shape-true": lambda body: tensor(body).update(shape=[True]),
    "shape-dims": lambda body: tensor(body).update(shape=[1] * 100_000),
    "shape-bomb": lambda body: tensor(body).update(shape=[10**18] * 100_000),
    "shape-text": lambda body: tensor(body).update(shape="75"),
    "chunks-none": chunked(),
    "chunks-huge": cut_in(lambda length, file, offset: [[0, 2**61, file, offset]]),
    "chunks-file": cut_in(lambda length, file, offset: [[0, length, 99, offset]]),
    "chunks-file-negative": cut_in(lambda length, file, offset: [[0, length, -1, offset]]),
    "chunks-outside": cut_in(lambda length, file, offset: [[0, length, file, 10**9]]),
    "chunks-negative": cut_in(lambda length, file, offset: [[0, length, file, -8]]),
    "chunks-over": cut_in(lambda length, file, offset: [[0, length, file, offset], [1, length - 1, file, offset + 4]]),
    "chunks-gap": cut_in(lambda n, file, offset: [[0, 1, file, offset], [2, n - 2, file, offset + 8]]),
    "chunks-short": cut_in(lambda length, file, offset: [[0, length - 1, file, offset]]),
    "chunks-long": cut_in(lambda length, file, offset: [[0, length, file, offset], [length, 1, file, offset]]),
    "chunks-order": cut_in(lambda n, file, offset: [[1, n - 1, file, offset + 4], [0, 1, file, offset]]),
    "chunks-shape": cut_in(lambda length, file, offset: [[0, length, file]]),
    "chunks-bomb": cut_in(lambda length, file, offset: [[0, length, file, offset]] + [[length, 1, file, 0]] * 50_000),
    "chunks-same": cut_in(lambda n, file, offset: [[i, 1, file, offset] for i in range(n)]),
    "tensor-twice": doubled,
    "tensor-same-bytes": aimed,
    "tensor-kind": lambda body: tensor(body).update(kind="code"),
    "tensor-state": lambda body: tensor(body).update(state={"a": 1}),
    "tensor-name": lambda body: tensor(body).update(name=["a"]),
    "tensor-name-half": lambda body: tensor(body).update(name="\ud800"),
    "tensor-dtype": lambda body: tensor(body).update(dtype="O8"),
    "tensor-dtype-list": lambda body: tensor(body).update(dtype=["F32"]),
    "tensors-mapping": put("tensors", value={}),
    "tensors-null": put("tensors", value=None),
    "step-negative": put("step", value=-3),
    "step-text": put("step", value="3"),
    "step-true": put("step", value=True),
    "world-text": put("world_size", value="two"),
    "versions-list": put("versions", value=[]),
    "aliases-number": put("aliases", value={"a": 3}),
    "files-mapping": put("files", value={}),
    "chunks-text": chunked("abcd"),
    "groups-mapping": put("optimizer", "groups", value={}),
    "groups-text": put("optimizer", "groups", value=[{"parameters": "ab", "options": {}}]),
    "groups-number": put("optimizer", "groups", value=3),
    "groups-lacking": put("optimizer", "groups", value=[{"parameters": ["a"]}]),
    "numbers-list": put("optimizer", "numbers", value=[1]),
    "numbers-number": put("optimizer", "numbers", value={"a": 1}),
    "training-list": put("training", value=[1]),
    "training-null": put("training", value=None),
    "format": put("format", value="another"),
    "version-text": put("version", value="1"),
    "lacking": lambda body: body.pop("optimizer"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_no_writer_writes_is_refused_though_the_digest_fits(damaged: Path, live: Any, claim: str) -> None:
    body = body_of(damaged)
    CLAIMS[claim](body)
    (damaged / "manifest.json").write_bytes(sealed(body))
    begun = time.perf_counter()
    assert f"{damaged}/" in refusal(damaged)
    with pytest.raises(CheckpointError):
        shardkit.load_checkpoint(live, damaged)
    assert time.perf_counter() - begun < 5


TEXTS = {
    "empty": b"",
    "empty-object": sealed("{}"),
    "list": sealed("[]"),
    "null": sealed("null"),
    "nan": sealed('{"format": "shardkit-checkpoint", "version": 1, "step": NaN}'),
    "infinity": sealed('{"format": "shardkit-checkpoint", "version": -Infinity}'),
    "digits": sealed('{"format": "shardkit-checkpoint", "version": ' + "9" * 100_000 + "}"),
    "deep-list": sealed('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    "deep-object": sealed('{"a":' * 100_000 + "1" + "}" * 100_000),
    "bytes": sealed('{"a": "') + b"\xff\xfe",
    "cut": sealed('{"format": "shardkit-check'),
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_manifest_at_all_is_refused(damaged: Path, text: str) -> None:
    (damaged / "manifest.json").write_bytes(TEXTS[text])
    assert "manifest.json" in refusal(damaged)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused_anywhere(damaged: Path, constant: str) -> None:
    text = json.dumps({**body_of(damaged), "training": {"lr": "HERE"}}).replace('"HERE"', constant)
    (damaged / "manifest.json").write_bytes(sealed(text))
    assert constant in refusal(damaged)


@pytest.mark.parametrize("where", ["training", "numbers", "groups"])
def test_values_nested_deeper_than_any_are_refused(damaged: Path, where: str) -> None:
    deep: Any = 1
    for _ in range(300):
        deep = {"a": [deep]}
    body = body_of(damaged)
    if where == "training":
        body["training"]["a"] = deep
    else:
        body["optimizer"][where] = [{"parameters": [], "options": deep}] if where == "groups" else {"a": deep}
    (damaged / "manifest.json").write_bytes(sealed(body))
    assert "deep" in refusal(damaged)


def test_what_would_be_refused_later_is_not_written(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    _, engine = trained(steps=1)
    with pytest.raises(CheckpointError, match="deep"):
        shardkit.save_checkpoint(engine, tmp_path / "a", step=1, training={"deep": deep})
    assert list((tmp_path / "a").iterdir()) == []


VALUES = {
    "tensor-of-text": {"!tensor": ["F32", ["a"]]},
    "tensor-ragged": {"!tensor": ["F32", [[1], [1, 2]]]},
    "tensor-dtype": {"!tensor": ["O8", [1]]},
    "tensor-short": {"!tensor": []},
    "tensor-overflow": {"!tensor": ["I8", [10**30]]},
    "float": {"!float": "one"},
    "float-list": {"!float": []},
    "tuple": {"!tuple": 3},
    "dict-keys": {"!dict": [[[1], 2]]},
    "dict-pairs": {"!dict": [[1, 2, 3]]},
    "counter": {"!counter": "abc"},
}


@pytest.mark.parametrize("value", VALUES)
def test_values_that_decode_to_nothing_are_refused(damaged: Path, live: Any, value: str) -> None:
    body = body_of(damaged)
    body["training"]["own"] = {"value": VALUES[value]}
    (damaged / "manifest.json").write_bytes(sealed(body))
    with pytest.raises(CheckpointError, match="cannot be read"):
        shardkit.load_checkpoint(live, damaged)


def test_mutated_manifests_are_read_or_refused_and_nothing_else(saved: Path) -> None:
    dice, original = random.Random(3), body_of(saved)
    read = 0
    for number in range(FUZZED):
        body = copy.deepcopy(original)
        for _ in range(dice.randrange(1, 4)):
            mutate(body, dice)
        data = sealed(body)
        try:
            manifest = parse(data, "m")
        except CheckpointError as error:
            assert str(error).startswith("m "), number
            continue
        read += 1
        # What is read holds what its fields promise.
        assert all(sum(c.length for c in e.chunks) == e.numel for e in manifest.entries.values())
        assert all(isinstance(each, dict) for each in manifest.numbers.values())
    # Not all mutations matter, and not all are harmless.
    assert FUZZED // 20 < read < FUZZED * 3 // 4


JUNK: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, 0.5, 1e308, "", "../x", "\0", "\ud800"),
    *([], {}, [[]], [1, 2, 3, 4], {"!tensor": 1}, {"name": "x"}, "a" * 5000, ["x"] * 50),
]


def mutate(value: Any, dice: random.Random) -> None:
    """Put junk in a random place, remove what is there, or put it twice."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = dice.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and dice.random() < 0.8:
            value = value[key]
            continue
        action = dice.random()
        if action < 0.15:
            del value[key]
        elif action < 0.3 and isinstance(value, list):
            value.insert(key, copy.deepcopy(value[key]))
        elif action < 0.4 and type(value[key]) is int:
            value[key] += dice.choice([-1, 1, 4, 1000])
        else:
            value[key] = copy.deepcopy(dice.choice(JUNK))
        return


@pytest.mark.parametrize(
    "field",
    [
        {"dtype": "F32", "shape": [10**18] * 50_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [10**9, 10**9 + 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, float("inf")]},
        7,
    ],
    ids=range(10),
)
def test_headers_of_plain_files_are_held_to_the_format(tmp_path: Path, field: Any) -> None:
    from shardkit.checkpoint.tensors import read_header

    text = json.dumps({"a": field}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    begun = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(open_storage(str(tmp_path)), "x.safetensors")
    assert time.perf_counter() - begun < 2


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x08" + bytes(7) + b"[[[[[[[[", (10**5).to_bytes(8, "little")])
def test_files_that_are_no_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    from shardkit.checkpoint.tensors import read_header

    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(open_storage(str(tmp_path)), "x.safetensors")
    deep = b"[" * 100_000
    (tmp_path / "x.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(open_storage(str(tmp_path)), "x.safetensors")
