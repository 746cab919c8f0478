"""A third party's engine, given by its dotted name, runs the conformance suite and is told where it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def conformance(engine: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no"]
    return subprocess.run(
        [*command, "tests/conformance", f"--backend=tests.third_party.engines:{engine}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_right_engine_passes_the_suite() -> None:
    done = conformance("ManualEngine")
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


@pytest.mark.slow
def test_a_wrong_engine_is_told_exactly_where_it_fails() -> None:
    done = conformance("SummingEngine")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    # One process sums as it averages: only the runs of two ranks fail, and the plain numbers show the factor.
    assert any("test_grad_norm_is_the_norm_before_clipping_on_every_rank" in line for line in failed)
    assert any("test_the_normaliser_is_global" in line for line in failed)
    assert not any("SummingEngine-1-" in line for line in failed), failed[:5]
    assert not any("test_masters_and_optimizer_state_are_fp32" in line for line in failed)


def test_what_is_no_engine_is_refused_by_its_missing_members() -> None:
    from shardkit.engines import registry
    from shardkit.errors import BackendError

    with pytest.raises(BackendError, match="is no engine, it lacks Options, describe"):
        registry.load("tests.third_party.engines:NoEngine")
