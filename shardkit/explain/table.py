"""Explanations side by side on a terminal: a column a backend, and one value where all say the same."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from shardkit.explain.explanation import Explanation, Fate
from shardkit.planning.amount import size

WIDTH = 120
# Columns of a terminal that a table has to fit.
NARROW = 20
# Columns that a backend needs; where there are more backends, tables follow each other.
LABEL = 24
GAP = "  "
_ROWS = (
    # label, section, keys; several keys make one cell.
    ("ranks x micro-steps", "", ()),
    ("storage", "dtypes", ("storage",)),
    ("compute", "dtypes", ("compute",)),
    ("parameter gather", "dtypes", ("gather",)),
    ("gradient reduction", "dtypes", ("reduce",)),
    ("master weights", "dtypes", ("masters",)),
    ("norm statistics", "dtypes", ("norm_statistics",)),
    ("loss divided by", "loss", ("divided_by",)),
    ("averaged over ranks by", "loss", ("averaged_by",)),
    ("clipping", "clipping", ("limit", "where")),
    ("non-finite found by", "nonfinite", ("found_by",)),
    ("non-finite, then", "nonfinite", ("then",)),
    ("unused parameters", "unused_parameters", ()),
    ("sharded", "shards", ()),
    ("gradients cross ranks", "reduces", ()),
)


def table(explanations: Sequence[Explanation]) -> str:
    """At most 120 columns wide."""
    shown = [e for e in explanations if e.sections]
    lines: list[str] = []
    rows = [(label, [_cell(e, section, keys) for e in shown]) for label, section, keys in _ROWS]
    rows += _traffic_rows(shown) + _rest(shown)
    equal = [(label, cells[0]) for label, cells in rows if cells and len(set(cells)) == 1]
    apart = [(label, cells) for label, cells in rows if len(set(cells)) > 1]
    names = ", ".join(_named(e) for e in shown)
    lines += textwrap.wrap(f"the same on {names}" if len(shown) > 1 else names, WIDTH, break_on_hyphens=False)
    lines += [line for label, cell in equal for line in _row(label, [cell], WIDTH - LABEL - len(GAP))]
    for begin in range(0, len(shown), _fitting()):
        some = slice(begin, begin + _fitting())
        width = (WIDTH - LABEL) // len(shown[some]) - len(GAP)
        if apart:
            lines += ["", *_row("", [_named(e) for e in shown[some]], width)]
        for label, cells in apart:
            lines += _row(label, cells[some], width)
    lines += _notes(shown) + _settings(explanations)
    return "\n".join(line.rstrip() for line in lines)


def _named(explanation: Explanation) -> str:
    return explanation.backend + (" (refuses)" if explanation.refused else "")


def _fitting() -> int:
    return (WIDTH - LABEL) // (NARROW + len(GAP))


def _cell(explanation: Explanation, section: str, keys: tuple[str, ...]) -> str:
    if not section:
        return f"{explanation.world_size} x {explanation.accumulation}, {explanation.device}"
    said = explanation.sections[section]
    if not keys:
        return str(said)
    return ", ".join(str(said[key]) for key in keys if said[key] is not None)


def _traffic_rows(shown: Sequence[Explanation]) -> list[tuple[str, list[str]]]:
    """A row a kind of collective, and one of what is the least."""
    kinds = dict.fromkeys(kind for e in shown for kind in e.sections["communication"] or {})
    rows = [
        (f"{kind.replace('_', '-')} a step", [_volume(e.sections["communication"], kind) for e in shown])
        for kind in sorted(kinds)
    ]
    least = [_least(e.sections["communication_least"]) for e in shown]
    return [*rows, ("the least for that", least)]


def _volume(traffic: Any, kind: str) -> str:
    if traffic is None:
        return "not known"
    if kind not in traffic:
        return "-"
    calls = traffic[kind]["calls"]
    return size(traffic[kind]["bytes"]) + (f" in {calls} calls" if calls else "")


def _least(traffic: Any) -> str:
    if traffic is None:
        return "not known"
    return ", ".join(f"{kind.replace('_', '-')} {size(found['bytes'])}" for kind, found in traffic.items()) or "-"


def _rest(shown: Sequence[Explanation]) -> list[tuple[str, list[str]]]:
    return [
        ("scheduler", [_scheduler(e.sections["scheduler"]) for e in shown]),
        ("norm layers", [_norm(e.sections["normalization"]) for e in shown]),
        ("recomputed", [", ".join(e.sections["recomputed"]) or "nothing" for e in shown]),
        ("a checkpoint holds", [_checkpoint(e.sections["checkpoint"]) for e in shown]),
        ("model", [_model(e.sections["model"]) for e in shown]),
    ]


def _scheduler(said: dict[str, Any]) -> str:
    steps = "an unknown number of" if said["steps"] is None else said["steps"]
    rate = "lr not known" if said["last_lr"] is None else f"lr {said['first_lr']:.4g} to {said['last_lr']:.4g}"
    if said["fails"]:
        rate = f"of which it cannot make all ({said['fails']})"
    return f"{said['class']}, {said['steps_per_optimizer_step']} an optimizer step; {steps} steps, {rate}"


def _norm(said: dict[str, Any]) -> str:
    layers = "; ".join(said["layers"]) or "none in this model"
    return f"{said['policy']}: {layers}" + (f" ({said['explanation']})" if said["explanation"] else "")


def _checkpoint(said: dict[str, Any]) -> str:
    if said["bytes"] is None:
        return f"parameters of {size(said['parameters_bytes'])}; the optimizer's tensors are not known; {said['also']}"
    return f"{said['tensors']} tensors, {size(said['bytes'])}; {said['also']}"


def _model(said: dict[str, Any]) -> str:
    trainable = said["trainable"]
    frozen = "" if trainable == said["parameters"] else f" ({trainable:,} trainable)"
    units = f"{said['units']} units and the rest" if said["units"] else "no units"
    return f"{said['parameters']:,} parameters{frozen} in {units}; looked at on {said['built_on']}"


def _notes(shown: Sequence[Explanation]) -> list[str]:
    notes: dict[str, list[str]] = {}
    for explanation in shown:
        for note in explanation.sections["communication_notes"]:
            notes.setdefault(note, []).append(explanation.backend)
    lines = [line for note, names in notes.items() for line in _wrapped(f"{', '.join(names)}: {note}")]
    return ["", "communication", *lines] if lines else []


def _settings(explanations: Sequence[Explanation]) -> list[str]:
    """Each setting that is given, with what becomes of it; what all consume alike together, by who does."""
    alike: dict[str, list[str]] = {}
    apart: list[str] = []
    keys = dict.fromkeys(fate.key for e in explanations for fate in e.settings)
    for key in (key for key in keys if key not in ("backend.name", "backend.adapter")):
        found = [(e.backend, fate) for e in explanations for fate in e.settings if fate.key == key]
        fates = {(fate.how, fate.into, repr(fate.value)) for _, fate in found}
        how, into, _ = next(iter(fates))
        if len(found) == len(explanations) and len(fates) == 1 and how == "consumed":
            alike.setdefault(into, []).append(_given(found[0][1]))
        else:
            apart += _apart(found)
    lines = ["", "settings that are given, and who consumes them"]
    lines += [line for into, given in alike.items() for line in _wrapped(f"{into}: {', '.join(given)}")]
    return lines + (["", "settings that the backends translate or refuse", *apart] if apart else [])


def _apart(found: Sequence[tuple[str, Fate]]) -> list[str]:
    """One setting of which several things become."""
    groups: dict[str, list[str]] = {}
    for backend, fate in found:
        groups.setdefault(f"{_given(fate)} is {fate.how}: {fate.into}", []).append(backend)
    return [line for said, names in groups.items() for line in _wrapped(f"{', '.join(names)}: {said}")]


def _given(fate: Fate) -> str:
    return fate.key if fate.value is None else f"{fate.key}={fate.value}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _row(label: str, cells: Sequence[str], width: int) -> list[str]:
    wrapped = [textwrap.wrap(label, LABEL - len(GAP)) or [""]]
    wrapped += [textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell in cells]
    widths = [LABEL - len(GAP), *[width] * len(cells)]
    return [
        GAP.join(part.ljust(w) for part, w in zip(parts, widths, strict=True))
        for parts in zip_longest(*wrapped, fillvalue="")
    ]
