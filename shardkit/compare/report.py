"""The report of a comparison: report.md, report.json and report.html in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkit.compare.equivalence import plain
from shardkit.compare.markdown import markdown
from shardkit.compare.results import Arm, Comparison
from shardkit.compare.terminal import table
from shardkit.compare.verdict import Verdict, are_equal, recommendation, verdicts
from shardkit.pages.page import can_draw

FORMAT = "shardkit-comparison"
VERSION = 1

__all__ = ["can_draw", "render", "table", "to_json"]


def render(comparison: Comparison, folder: Path, found: Mapping[str, Verdict] | None = None) -> list[Path]:
    """Write the report into a folder and return its files.

    report.html needs the extra `reports`, and is left out where it is not installed; see `can_draw`.

    Args:
        found: the verdicts, where they are known already.
    """
    found = found or verdicts(comparison)
    title = title_of(comparison)
    texts = {
        "report.md": markdown(comparison, found, title),
        "report.json": json.dumps(to_json(comparison, found), indent=1, allow_nan=False) + "\n",
    }
    if can_draw():
        from shardkit.compare.html import page

        texts["report.html"] = page(comparison, found, title)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def to_json(comparison: Comparison, found: Mapping[str, Verdict]) -> dict[str, Any]:
    """The whole report as plain JSON; bytes and seconds, null where a number is not known or not finite."""
    return plain(
        {
            "format": FORMAT,
            "version": VERSION,
            "reference": comparison.reference,
            "steps": comparison.steps,
            "equal": are_equal(found),
            "recommendation": recommendation(found),
            "arms": [{**found[arm.name].to_json(), **_arm(arm)} for arm in comparison.arms],
        }
    )


def title_of(comparison: Comparison) -> str:
    """What was compared."""
    name = comparison.reference_arm.recipe.get("name") or "runs"
    return f"Comparison of {name}: {', '.join(arm.name for arm in comparison.arms)}"


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "command": arm.command,
        "recipe": arm.recipe,
        "explanation": arm.explanation,
        "runs": [
            {"folder": str(run.folder), "status": run.status, "error": run.error, "environment": run.environment}
            for run in arm.runs
        ],
    }
