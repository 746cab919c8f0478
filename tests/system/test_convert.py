"""Real DeepSpeed checkpoints of two ranks, converted, against what shardkit saved of the same engine; and back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.convert import Options, convert
from shardkit.checkpoint.difference import difference
from shardkit.checkpoint.export import whole
from shardkit.checkpoint.place import one
from shardkit.checkpoint.source import source_of
from shardkit.errors import RequestError

pytest.importorskip("deepspeed")
Launch = Callable[..., list[Any]]
TRUST = Options(trust=True)
CASES = {
    "zero1": (1, {}),
    "zero2": (2, {}),
    "zero2-round-robin": (2, {"round_robin_gradients": True}),
    "zero3": (3, {"stage3_param_persistence_threshold": 0}),
}


@pytest.fixture(scope="module")
def saved(launch_ranks: Launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(case)`: a folder with own/ and deepspeed/, of two ranks; made once."""
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            stage, options = CASES[case]
            launch_ranks(2, "tests.system.zero_ranks:save", stage, str(made[case]), options)
        return made[case]

    return make


@pytest.mark.parametrize("case", CASES)
def test_a_deepspeed_folder_becomes_what_shardkit_saves(
    saved: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    folder = saved(case)
    out = one(convert(str(folder / "deepspeed"), str(tmp_path / "out"), TRUST))
    found = difference(one(str(folder / "own")), out)
    assert not found.any, found
    manifest = out.manifest()
    assert manifest.aliases == {"head.weight": "first.weight"} and manifest.step == 3
    assert manifest.backend == f"deepspeed-{case[:5]}" and manifest.world_size == 2


@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_deepspeeds_own_universal_folder_is_read(saved: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    folder = saved(case)
    tag = folder / "deepspeed" / "global_step3"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(tag), "--output_folder", str(tmp_path / "universal" / "global_step3")]
    (tmp_path / "universal").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    out = one(convert(str(tmp_path / "universal"), str(tmp_path / "out"), TRUST))
    found = difference(one(str(folder / "own")), out)
    assert not (found.tensors or found.numbers or found.groups or found.only_b), found
    # ds_to_universal keeps parameters that are not trained elsewhere, for stage 3.
    assert case == "zero2" or [key[1] for key in found.only_a] in ([], ["frozen"])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_deepspeed_loads_the_universal_folder(
    saved: Callable[[str], Path], launch_ranks: Launch, tmp_path: Path, case: str, stage: int
) -> None:
    """Across stages, and from two ranks to one."""
    place = one(str(saved(case) / "own"))
    out = convert(place.path, str(tmp_path / "universal"), Options(to="universal"))
    source = source_of(place.storage, place.name, place.manifest())
    [intervals] = launch_ranks(1, "tests.system.zero_ranks:load_universal", stage, out)
    compared = 0
    for kind, name, state, start, tensor in intervals:
        if kind == "buffer" or name == "frozen":
            continue  # DeepSpeed reads neither.
        expected = whole(source, (kind, name, state)).view(-1)[start : start + tensor.numel()]
        assert torch.equal(tensor, expected), (kind, name, state)
        compared += 1
    assert compared == 21
    back = one(convert(out, str(tmp_path / "out"), TRUST))
    found = difference(place, back)
    assert not found.any, found


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("layout", ["deepspeed", "universal"])
def test_a_payload_does_not_run(saved: Callable[[str], Path], tmp_path: Path, layout: str) -> None:
    folder = saved("zero2") / "deepspeed"
    if layout == "universal":
        folder = Path(convert(str(saved("zero2") / "own"), str(tmp_path / "universal"), Options(to="universal")))
    planted = next(folder.rglob("mp_rank_00_model_states.pt"))
    before = planted.read_bytes()
    state = torch.load(planted, weights_only=False)
    torch.save({**state, "client": Payload(tmp_path / "ran")}, planted)
    try:
        with pytest.raises(RequestError, match=r"its files are pickles.*add --trust"):
            convert(str(folder), str(tmp_path / "out"), Options())
        assert not (tmp_path / "out").exists() and not (tmp_path / "ran").exists()
        # Even then nothing of it runs: what is not a tensor or plain data is only described.
        convert(str(folder), str(tmp_path / "out"), TRUST)
        assert not (tmp_path / "ran").exists()
    finally:
        planted.write_bytes(before)


def test_a_lost_rank_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    from shardkit.errors import CheckpointError

    folder = Path(shutil.copytree(saved("zero2") / "deepspeed" / "global_step3", tmp_path / "global_step3"))
    next(folder.glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="saved by 2 ranks, and there are 1"):
        convert(str(folder), str(tmp_path / "out"), TRUST)
