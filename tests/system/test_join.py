"""A process may end right after it has left the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# What still holds a group keeps its threads, and the last collective ends late: the thread then asks for the GIL.
LATE = """
import time
import torch
import torch.distributed as dist
import shardkit

with shardkit.join() as world:
    held = dist.group.WORLD
    tensor = torch.ones(4)
    late = dist.all_reduce(tensor, async_op=True).get_future().then(lambda _: time.sleep(0.02))
print("ended")
"""


def test_a_process_ends_normally_though_a_thread_still_holds_its_last_tensors(tmp_path: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", LATE],
        env={**os.environ, **ranks, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
