"""A lock that a killed compilation left behind holds nobody up (trap B53)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_deepspeed_starts_beside_a_stale_lock_and_compiles_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "shardkit.launch", "recipes/digits-resnet.yaml", "backend=zero2"]
    done = subprocess.run(
        [*command, "train.max_steps=1", f"run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in (tmp_path / "extensions").rglob("*") if path.is_file()] == ["lock"]
