from __future__ import annotations

from dataclasses import replace

import pytest

from shardkit.planning.plan import Plan, Row
from shardkit.planning.reason import reason
from shardkit.planning.table import by_world_size, columns, shown, table
from tests.unit.planning.rows import GIB, plan_of, row


def plan() -> Plan:
    return plan_of(
        row("first", 12, rung=1, largest=2),
        row("first", 8, recompute=True),
        row("second", 8, rung=2),
        row("second", 6, recompute=True),
        row("third", None, rung=3),
        row("third", None, rung=3, world_size=4),
        row("fourth", 5, rung=4, world_size=4, options={"keep": False}, footprint={"settings": {"bucket": 77}}),
        Row(choice=row("fifth", 1).choice, refused="it is not for this recipe"),
    )


def lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    return table(plan(), reason(plan()), correction="Corrected.")


def test_a_row_has_its_numbers(wide: str) -> None:
    (first,) = lines(wide, "  first ")[:1]
    assert " ".join(first.split()) == "first 1.50 3.00 1.50 6.00 12.0 12.0 2 GiB over 2 1 GiB 1 s"
    assert "2 ranks of 10 GiB, micro-batches of 4, 2 a step; in GiB" in wide
    assert lines(wide, " exact ") and lines(wide, " estimate ")


def test_what_is_recommended_is_marked(wide: str) -> None:
    assert lines(wide, "* second") and lines(wide, "+ first") and "* recommended   + runner-up" in wide
    assert plan().runner_up == row("first", 8, recompute=True)


def test_recomputed_rows_are_shown_where_they_decide() -> None:
    names = {each.choice.name for each in shown(plan())}
    assert names == {"first", "first, activation_checkpointing=blocks", "second", "fourth, keep=false"}
    assert len(shown(plan(), every=True)) == 5
    assert [len(group) for group in by_world_size(shown(plan()))] == [3, 1]


def test_what_has_no_numbers_is_a_sentence(wide: str) -> None:
    assert "third (2 and 4 ranks): nothing is known" in wide
    assert "fifth (2 ranks): it is not for this recipe" in wide
    assert "1 more with recomputed blocks" in wide
    assert "Buffers chosen from the model, fourth: bucket=77." in wide
    assert "Corrected." in wide and "Not seen" in wide


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = table(plan(), reason(plan()))
    assert max(map(len, text.splitlines())) <= columns
    for word in ("params", "activations", "needs", "micro", "moved"):
        assert word in text


def test_host_memory_is_told_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = plan_of(row("hosted", 2, footprint={"host": 3 * GIB, "host_loading": 4 * GIB}))
    text = table(found, reason(found))
    assert "Host memory that a rank's offloaded states take: hosted on 2 ranks 3 GiB." in text
    assert "Each rank builds the whole model in host memory first: 4 GiB" in text


def test_what_is_needed_without_activations_is_at_least_needed() -> None:
    dark = replace(row("dark", 12), unknown="no trace")
    cells = {column.head: column.cell(dark) for column in columns([dark])}
    assert cells["needs"] == "at least 12.0" and cells["fits"] == "at least 2 GiB over" and cells["peak"] == "-"
