"""Writes a resolved recipe as YAML, each value that was given with a comment that says where."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from shardkit.recipe.interpolation import escape
from shardkit.recipe.scalars import meaning

_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


def written(values: dict[str, Any], origins: Mapping[str, str], default: str) -> str:
    """YAML that reads back as `values`; a value whose origin is `default` gets no comment."""
    comments = {key: place for key, place in origins.items() if place != default}
    return "\n".join(_lines(values, "", comments)) + "\n"


def _lines(value: Any, key: str, comments: Mapping[str, str]) -> list[str]:
    """The lines of a mapping or a list that is not empty, without indentation."""
    lines: list[str] = []
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in pairs:
        inner = f"{key}.{name}" if key else str(name)
        start = f"{_text(name)}:" if isinstance(value, dict) else "-"
        if isinstance(item, (dict, list)) and item:
            nested = _lines(item, inner, comments)
            if start == "-":
                lines += [f"- {nested[0]}", *(f"  {line}" for line in nested[1:])]
            else:
                lines += [start, *(f"  {line}" for line in nested)]
        else:
            place = comments.get(inner)
            comment = f"  # {place if place.isprintable() else repr(place)}" if place else ""
            lines.append(f"{start} {_scalar(item)}{comment}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(escape(value))
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _text(text: str) -> str:
    if _NEEDS_NO_QUOTES.fullmatch(text) and meaning(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', width=sys.maxsize).rstrip("\n")
