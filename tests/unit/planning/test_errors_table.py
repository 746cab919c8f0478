from __future__ import annotations

from shardkit.planning.errors_table import errors_table
from shardkit.planning.measurement import PARTS, Measurement
from tests.unit.planning.rows import GIB, row


def test_predicted_measured_and_the_error_stand_below_each_other() -> None:
    parts = {**dict.fromkeys(PARTS, 0), "parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB}
    parts |= {"activations": 5 * GIB, "peak": 10 * GIB}
    ran = Measurement(row=row("ddp", 8), parts=parts, seconds=0.5)
    failed = Measurement(row=row("zero9", 8), error="rank 0: no such thing")
    lines = [" ".join(line.split()) for line in errors_table([ran, failed]).splitlines()]
    assert lines[1] == "in GiB params optimizer grads activations peak step"
    assert "predicted 1.00 2.00 1.00 4.00 8.00 1 s" in lines
    assert "measured 1.00 2.00 1.00 5.00 10.0 500 ms" in lines
    assert "error 0 % 0 % 0 % -20.0 % -20.0 % +100.0 %" in lines
    assert lines[-1] == "zero9 on 2 ranks failed: rank 0: no such thing"
