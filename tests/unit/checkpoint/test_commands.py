"""The console commands: what they print, and what code they end with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner, Result

from shardkit.cli import app
from shardkit.errors import RequestError

Save = Callable[..., Path]


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_inspect_one(save: Save) -> None:
    text = run("checkpoint", "inspect", save()).stdout
    assert "step 3, saved 20" in text and "single on 1 rank" in text
    assert "  head.weight = embed.weight" in text.replace("tied:", "") and "normalization.policy: keep" in text
    assert "group 1: 3 parameters, weight_decay=0, lr=0.003" in text and "samples: 18" in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    rows = {tuple(line.split()[:3]) for line in text.splitlines() if line.startswith(("  param", "  buff", "  exp"))}
    assert {("parameter", "F32", "6"), ("buffer", "F32", "2"), ("buffer", "I64", "1"), ("exp_avg", "F32", "5")} <= rows


def test_inspect_tensors_and_json(save: Save) -> None:
    folder = save()
    assert "exp_avg_sq of body.weight" in run("checkpoint", "inspect", folder, "--tensors").stdout
    found = json.loads(run("checkpoint", "inspect", folder, "--tensors", "--json").stdout)
    assert found["step"] == 3 and found["training"]["samples"] == 18
    counter = next(each for each in found["tensors"] if each["dtype"] == "I64")
    assert (counter["kind"], counter["name"], counter["shape"]) == ("buffer", "norm.num_batches_tracked", [])


def test_a_run_is_a_line_a_checkpoint(save: Save, tmp_path: Path) -> None:
    save(3, root="run/checkpoints")
    (save(12, root="run/checkpoints") / "manifest.json").write_text("{}")
    result = run("checkpoint", "inspect", tmp_path / "run", code=1)
    lines = result.stdout.splitlines()
    assert lines[1].split()[0] == "3" and "12  damaged" in lines[2]


def test_verify_names_each_damaged_file(save: Save, tmp_path: Path) -> None:
    save(3)
    assert ": ok, 1 file, " in run("checkpoint", "verify", tmp_path / "checkpoints").stdout
    shard = next(save(4).glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(bytes(data))
    text = run("checkpoint", "verify", tmp_path / "checkpoints", code=1).stdout
    assert (
        "step-00000003: ok" in text
        and "step-00000004: damaged" in text
        and f"{shard.name} is damaged: its crc32" in text
    )
    rows = json.loads(run("checkpoint", "verify", tmp_path / "checkpoints", "--json", code=1).stdout)
    assert [row["ok"] for row in rows] == [True, False]


def test_diff_ends_with_5(save: Save) -> None:
    first, second, other = save(3), save(4), save(3, root="other")
    assert run("checkpoint", "diff", first, other).stdout.startswith("equal: ")
    text = run("checkpoint", "diff", first, second, code=5).stdout
    assert "tensors that differ" in text and all(len(line) <= 100 for line in text.splitlines())
    assert json.loads(run("checkpoint", "diff", first, second, "--json", code=5).stdout)["equal"] is False


def test_urls(save: Save, tmp_path: Path) -> None:
    folder = save()
    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe_file(f"/kept/{folder.name}/{file.name}", file.read_bytes())
    url = f"memory://kept/{folder.name}"
    assert "step 3" in run("checkpoint", "inspect", url).stdout
    assert "ok" in run("checkpoint", "verify", "memory://kept").stdout
    run("checkpoint", "diff", url, folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("checkpoint", "inspect", "absent"), "absent is no shardkit checkpoint"),
        (("checkpoint", "verify", "absent"), "there is no such path; . holds checkpoints"),
        (("checkpoint", "diff", "absent", "absent"), "absent is no shardkit checkpoint"),
        (("convert", "absent", "out"), "absent is nothing that can be converted"),
        (("convert", "checkpoints", "checkpoints"), "is there already"),
        (("convert", "checkpoints", "out", "--to", "onnx"), "expected one of safetensors, hf, dcp"),
        (("convert", "checkpoints", "out", "--dtype", "int8"), "expected one of bf16, fp16, fp32"),
        (("convert", "checkpoints", "out", "--max-shard-size", "big"), "'big' is no size"),
        (("convert", "checkpoints", "out", "--to", "safetensors"), "ends in .safetensors"),
        (("convert", "checkpoints", "out.safetensors", "--to", "hf"), "names a file"),
        (("convert", "checkpoints", "out", "--to", "shardkit"), "is a shardkit checkpoint already"),
        (("convert", "checkpoints", "out", "--to", "dcp", "--dtype", "bf16"), "--dtype is for safetensors files"),
        (("convert", "checkpoints", "memory://x/out", "--to", "dcp"), "writes to a local path only"),
        (("convert", "nosuch://x", "out"), "nosuch"),
    ],
)
def test_wrong_requests_end_with_2(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    save()
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, code=2)
    assert said in result.stderr and "Traceback" not in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}


def test_a_damaged_checkpoint_ends_with_1(save: Save, tmp_path: Path) -> None:
    folder = save()
    next(folder.glob("shard-*")).unlink()
    assert "is not there" in run("convert", folder, tmp_path / "out", code=1).stderr
    (folder / "manifest.json").write_text("{}")
    assert "is damaged" in run("checkpoint", "inspect", folder, code=1).stderr
    assert not (tmp_path / "out").exists()


def test_convert_says_what_it_wrote(save: Save, tmp_path: Path) -> None:
    save()
    assert run("convert", tmp_path / "checkpoints", tmp_path / "a.safetensors", "--dtype", "bf16").stderr.startswith(
        "shardkit: wrote "
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "checkpoints"]


def test_sizes() -> None:
    from shardkit.checkpoint.convert import parse_size

    assert [parse_size(text) for text in ("5GB", "1.5 MB", "2GiB", "300")] == [5 * 10**9, 1_500_000, 2**31, 300]
    with pytest.raises(RequestError):
        parse_size("0")
