"""What every test can use: the suite's own options, and ranks from a fork server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A suite started in the background by a shell ignores SIGINT, and so would all it starts; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        default=[],
        help="run the conformance suite on these backends only: names from backends/, or 'my_package.module:MyEngine'",
    )
    parser.addoption("--table", help="write the table of the checkpoint matrix to this file")
    parser.addoption("--communication-table", help="write the table of counted communication to this file")


@pytest.fixture(scope="session")
def fork_server() -> Any:
    """A process that imported everything a rank needs; ranks are forked from it in tenths of a second."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # Python before 3.13 does not hand sys.path to the fork server.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sys.path.insert(0, str(ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conformance.warm"])
    return context


@pytest.fixture(scope="session")
def launch_ranks(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """`launch_ranks(size, function, *arguments)`: run a function of tests/conformance/ranks.py on fresh ranks.

    Returns each rank's result. A rank that raised gives the exception's (type, message, traceback) instead when
    `errors=True`, and fails the test otherwise.
    """

    def launch(size: int, function: str, *arguments: Any, errors: bool = False) -> list[Any]:
        from tests.conformance.ranks import rank_main

        folder = tmp_path_factory.mktemp("ranks")
        processes = [
            fork_server.Process(target=rank_main, args=(rank, size, str(folder), function, arguments))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        outcomes = []
        for rank in range(size):
            result = folder / f"result-{rank}"
            if not result.exists():
                log = (folder / f"log-{rank}").read_text()[-4000:]
                pytest.fail(f"rank {rank} of {size} ended without a result in {function}{arguments}:\n{log}")
            outcomes.append(pickle.loads(result.read_bytes()))
        failed = [(rank, value) for rank, (status, value) in enumerate(outcomes) if status == "error"]
        if failed and not errors:
            rank, (_, _, trace) = failed[0]
            pytest.fail(f"rank {rank} of {size} failed in {function}:\n{trace}")
        return [value for _, value in outcomes]

    return launch
