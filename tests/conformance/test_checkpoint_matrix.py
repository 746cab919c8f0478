"""Saved on any backend and world, resumed on any other: the state is the same bits, the curve goes on.

The whole matrix, with its table:
`python -m pytest tests/conformance/test_checkpoint_matrix.py -m slow --table docs/checkpoints.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.checkpoint_ranks import write_whole
from tests.conformance.conftest import ONE_PROCESS, backend_named

LOSS = 2e-7
# Largest relative difference of the next four losses in fp32; controls must be beyond it.
RANKS = "tests.conformance.checkpoint_ranks:"
Place = tuple[str, int]

QUICK_SOURCES: list[Place] = [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("zero3", 2)]
QUICK_TARGETS: list[Place] = [("single", 1), ("ddp", 2), ("fsdp2", 4), ("zero1", 2), ("zero2", 3), ("zero3", 2)]
BACKENDS = [
    *("single", "ddp", "fsdp2", "zero1", "zero2", "zero3"),
    *(f"accelerate-{name}" for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3")),
]
ALL: list[Place] = [
    (name, world)
    for name in BACKENDS
    for world in (1, 2, 3, 4)
    if world == 1 or backend_named(name).adapter not in ONE_PROCESS
]


class Matrix:
    """Sources and targets, each started once."""

    def __init__(self, launch_ranks: Callable[..., list[Any]], folder: Path, precision: str = "fp32") -> None:
        self._launch, self._folder, self._precision = launch_ranks, folder, precision
        self.sources: dict[Place, dict[str, Any]] = {}
        self.cells: dict[tuple[Place, Place], dict[str, Any]] = {}

    def save(self, places: list[Place]) -> None:
        for name, world in places:
            if (name, world) not in self.sources:
                folder = str(self._folder / f"{name}-{world}")
                ranks = self._launch(world, f"{RANKS}save_source", backend_named(name), folder, self._precision)
                write_whole(ranks[0]["path"], ranks)
                self.sources[name, world] = ranks[0]

    def resume(self, places: list[Place]) -> None:
        paths = [(f"{name}-{world}", source["path"]) for (name, world), source in self.sources.items()]
        for name, world in places:
            ranks = self._launch(world, f"{RANKS}resume_all", backend_named(name), paths, self._precision)
            for source in self.sources:
                key = f"{source[0]}-{source[1]}"
                self.cells[source, (name, world)] = worst_of([rank[key] for rank in ranks])

    def check(self, loss: float) -> None:
        """Every cell at once: a failure lists all that are wrong."""
        wrong = []
        for (source, target), cell in self.cells.items():
            was = self.sources[source]
            deviation = relative(cell["after"], was["after"])
            same = cell["evaluations"] == {was["evaluation"]} or (self._precision != "fp32")
            if cell["state"] or cell["missing"] or cell["numbers"] or deviation > loss or not same:
                wrong.append(f"{source} -> {target}: {cell}, losses off by {deviation:.1e}, {was['evaluation']}")
        assert not wrong, "\n".join(wrong[:20])


def worst_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "state": max(rank["state"] for rank in ranks),
        "missing": sum(rank["missing"] for rank in ranks),
        "numbers": sum(rank["numbers"] for rank in ranks),
        "evaluations": {rank["evaluation"] for rank in ranks},
        "after": ranks[0]["after"],
        "step": ranks[0]["step"],
    }


def relative(losses: list[float], expected: list[float]) -> float:
    assert len(losses) == len(expected) == 4
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def test_the_curve_goes_on_wherever_it_was_saved(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    matrix = Matrix(launch_ranks, tmp_path)
    matrix.save(QUICK_SOURCES)
    matrix.resume(QUICK_TARGETS)
    assert len(matrix.cells) == len(QUICK_SOURCES) * len(QUICK_TARGETS)
    matrix.check(LOSS)


@pytest.mark.slow
def test_every_backend_to_every_other(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Saved on 2 or 3 ranks, resumed on 3 or 2; with --table on 1, 2, 3 and 4, all pairs (6 minutes)."""
    table = request.config.getoption("--table")
    sources, targets = (ALL, ALL) if table else (spread(2, 3), spread(3, 2))
    matrix = Matrix(launch_ranks, tmp_path)
    matrix.save(sources)
    matrix.resume(targets)
    if table:
        write_table(Path(table), as_table(matrix))
    assert len(matrix.cells) == (41**2 if table else len(BACKENDS) ** 2)
    matrix.check(LOSS)


def spread(*worlds: int) -> list[Place]:
    """Each backend at one of the worlds, in turn; one process where it has no more."""
    return [
        (name, 1 if backend_named(name).adapter in ONE_PROCESS else worlds[index % len(worlds)])
        for index, name in enumerate(BACKENDS)
    ]


@pytest.mark.slow
def test_bf16_masters_are_the_same_bits(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    places: list[Place] = [("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2)]
    matrix = Matrix(launch_ranks, tmp_path, "bf16-mixed")
    matrix.save(places)
    matrix.resume(places)
    # Uninterrupted runs of these backends differ from each other by as much: the loss is computed in bf16.
    apart = [
        relative(one["after"], other["after"]) for one in matrix.sources.values() for other in matrix.sources.values()
    ]
    matrix.check(max(2e-3, 2 * max(apart)))


def write_table(path: Path, table: str) -> None:
    """Put the table between its marks, if the file has them, else into a file of its own."""
    begin, end = "<!-- matrix -->\n", "<!-- /matrix -->"
    text = path.read_text(encoding="utf-8") if path.exists() else begin + end
    before, rest = text.split(begin)
    path.write_text(before + begin + table + end + rest.split(end)[1], encoding="utf-8")


def as_table(matrix: Matrix) -> str:
    """Worst relative loss deviation over the worlds, rows = saved on, columns = resumed on."""
    lines = [
        "| saved on \\ resumed on | " + " | ".join(BACKENDS) + " |",
        "|---|" + "---|" * len(BACKENDS),
    ]
    for row in BACKENDS:
        values = []
        for column in BACKENDS:
            cells = [
                relative(cell["after"], matrix.sources[source]["after"])
                for (source, target), cell in matrix.cells.items()
                if (source[0], target[0]) == (row, column)
            ]
            values.append(f"{max(cells):.1e}")
        lines.append(f"| {row} | " + " | ".join(values) + " |")
    states = max(cell["state"] for cell in matrix.cells.values())
    worst = max(relative(cell["after"], matrix.sources[s]["after"]) for (s, _), cell in matrix.cells.items())
    lines += [
        "",
        f"{len(matrix.cells)} cells. Largest relative difference of the next four losses: {worst:.1e}. Largest "
        f"difference of a restored parameter, buffer or moment: {states:g}.",
    ]
    return "\n".join(lines) + "\n"


def test_the_gate_fails_when_anything_is_lost(launch_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    source = launch_ranks(2, f"{RANKS}save_source", backend_named("ddp"), str(tmp_path))[0]
    results = launch_ranks(2, f"{RANKS}resume_without", backend_named("ddp"), source["path"])[0]
    deviations = {lost: relative(losses, source["after"]) for lost, losses in results.items()}
    print({lost: f"{value:.1e}" for lost, value in deviations.items()})
    assert deviations.pop("nothing") <= LOSS
    assert len(deviations) == 8 and all(value > LOSS for value in deviations.values()), deviations


@pytest.mark.parametrize(("source", "target"), [(("ddp", 2), ("zero2", 2)), (("zero3", 2), ("fsdp2", 2))])
def test_dropout_goes_on_with_its_streams(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path, source: Place, target: Place
) -> None:
    run = f"{RANKS}dropout_run"
    whole = launch_ranks(source[1], run, backend_named(source[0]), str(tmp_path), True)[0]
    again = launch_ranks(target[1], run, backend_named(target[0]), str(tmp_path), False)[0]
    assert again["losses"] == pytest.approx(whole["losses"], rel=LOSS) and again["notes"] == ()
    other = launch_ranks(1, run, backend_named(target[0]), str(tmp_path), False)[0]
    assert abs(other["losses"][0] / whole["losses"][0] - 1) > 1e-4
    assert other["notes"] == ("random streams go on as they are: the checkpoint has those of 2 ranks",)
