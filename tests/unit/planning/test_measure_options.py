from __future__ import annotations

from shardkit.planning.measure import _asked
from tests.unit.planning.rows import row


def test_options_of_the_command_line_reach_the_backends_that_have_them() -> None:
    words = ["train.max_steps=2", "backend.options.bucket_cap_mb=3", "backend.options.reshard_after_forward=false"]
    assert _asked(row("ddp", 1), words) == ["backend.options.bucket_cap_mb=3"]
    assert _asked(row("fsdp2", 1), words) == ["backend.options.reshard_after_forward=false"]
    assert _asked(row("fsdp2", 1, options={"reshard_after_forward": True}), words) == []
