"""What a single value means for the field it is for: whole numbers, numbers, text, true or false, choices.

Numbers are those of YAML 1.2, and `1_000` is one thousand. Only true and false are booleans: yes, no, on and
off are text, as are `0123`, `12:30:45` and dates. A number too large to hold is refused, never infinite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from shardkit.recipe.suggest import did_you_mean
from shardkit.recipe.tree import Leaf

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INT = re.compile(rf"[-+]?(?!0[0-9_]){_DIGITS}")
_HEX_OR_OCTAL = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}\.(?:{_DIGITS})?|{_DIGITS}(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)")
_NOT_A_NUMBER = (".nan", ".NaN", ".NAN")
_NULL = ("", "~", "null", "Null", "NULL")
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class Wrong(Exception):
    """What is wrong with a value, and what to do."""


def meaning(text: str) -> Any:
    """What text without quotes means where any value may stand.

    Raises:
        Wrong: it is a number too large or too small to hold.
    """
    if text in _NULL:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if _INT.fullmatch(text):
        return int(_decimal(text))
    if _HEX_OR_OCTAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(_decimal(text))
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return math.nan if text in _NOT_A_NUMBER else text


def is_null(leaf: Leaf) -> bool:
    """The value is null, or nothing is written."""
    return leaf.value in _NULL if leaf.kind == "plain" else leaf.value is None


def anything(leaf: Leaf) -> Any:
    """The value where the field says nothing about its type."""
    return meaning(leaf.value) if leaf.kind == "plain" else leaf.value


def text(leaf: Leaf) -> str:
    """Text without quotes is kept as it was written."""
    if is_null(leaf):
        raise _refusal(leaf, "text", "" if leaf.empty else "; write it in quotes if the word is meant")
    if isinstance(leaf.value, bool):
        return str(leaf.value).lower()
    return str(leaf.value)


def truth(leaf: Leaf) -> bool:
    value = anything(leaf)
    if not isinstance(value, bool):
        raise _refusal(leaf, "true or false", _unquoted(leaf, bool))
    return value


def whole_number(leaf: Leaf) -> int:
    """An int; 1e3 is one, 2.5 and true are not."""
    value = anything(leaf)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(_decimal(leaf.value)) if leaf.kind == "plain" else int(value)
    raise _refusal(leaf, "a whole number", _unquoted(leaf, int) or _without_zeros(leaf))


def number(leaf: Leaf) -> float:
    """A float; an int is one, true is not."""
    value = anything(leaf)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise Wrong(f"{leaf.value!r} is too large for a number") from None
    raise _refusal(leaf, "a number", _unquoted(leaf, float) or _without_zeros(leaf))


def choice(leaf: Leaf, choices: Sequence[Any]) -> Any:
    """One of the values of a Literal."""
    for option in choices:
        value = leaf.value if isinstance(option, str) else anything(leaf)
        if value == option and isinstance(value, bool) == isinstance(option, bool):
            return option
    names = [str(option) for option in choices]
    expected = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    raise _refusal(leaf, expected, did_you_mean(str(leaf.value), names))


def _decimal(number: str) -> Decimal:
    """The exact number, if a float can come near it."""
    exact = Decimal(number.replace("_", ""))
    if math.isinf(near := float(exact)):
        raise Wrong(f"{number!r} is too large for a number; in quotes it is text")
    if exact and not near:
        raise Wrong(f"{number!r} is too small for a number; write 0, or put it in quotes if text is meant")
    return exact


def _refusal(leaf: Leaf, expected: str, hint: str) -> Wrong:
    if leaf.empty:
        return Wrong(f"is empty; expected {expected}{hint}")
    if is_null(leaf):
        return Wrong(f"null is not {expected}{hint}")
    because = ", being in quotes," if leaf.kind == "quoted" else ""
    return Wrong(f"{leaf.value!r}{because} is not {expected}{hint}")


def _unquoted(leaf: Leaf, kind: type) -> str:
    """A hint for '7' where 7 is meant."""
    if leaf.kind == "plain" or not isinstance(leaf.value, str):
        return ""
    value = meaning(leaf.value)
    fits = type(value) is kind or (kind is float and type(value) is int)
    return f"; write {leaf.value} without quotes" if fits else ""


def _without_zeros(leaf: Leaf) -> str:
    """A hint for 0123, which is octal to some and decimal to others."""
    bare = leaf.value.lstrip("0") if leaf.kind == "plain" else ""
    return f"; write {bare}" if bare.isdecimal() else ""
