"""Puts values into the text of a recipe and leaves the rest of it, comments too, as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from shardkit.recipe.positions import node_of
from shardkit.recipe.tree import Key, dotted
from shardkit.recipe.writing import written

Value = str | Mapping[str, Any]
# YAML of one value as it is written, or a mapping of plain values.


class NoPlace(ValueError):
    """There is no place in the text for a key; the caller has to write the document anew."""


def edited(text: str, key: Key, value: Value, comments: Mapping[str, str] | None = None) -> str:
    """The text with a value in place of what stood at a key, or added where nothing did.

    Args:
        text: a YAML document whose top level is a mapping.
        key: where the value goes.
        value: YAML of a scalar or in brackets, as it is; or a mapping, which is written out in block style.
        comments: dotted key inside the mapping -> what to write behind its value.

    Raises:
        NoPlace: something else stands in the way.
    """
    try:
        node = node_of(text)
    except yaml.YAMLError as error:
        raise NoPlace(str(error)) from error
    place = _Text(text)
    for depth, part in enumerate(key):
        found = _child(node, part)
        if found is None:
            return place.added(node, key[depth:], value, comments or {})
        holder, (name, node) = node, found
        if depth + 1 < len(key) and _is_empty(node):
            nested = _nested(key[depth + 1 :], value)
            return place.replaced(holder, name, node, nested, _deeper(comments, key[depth + 1 :]))
        if depth + 1 == len(key):
            return place.replaced(holder, name, node, value, comments or {})
    raise NoPlace("no key is given")


def _child(node: yaml.Node | None, part: str | int) -> tuple[yaml.Node | None, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        return next(((name, value) for name, value in node.value if name.value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and str(part).isdecimal() and int(part) < len(node.value):
        return None, node.value[int(part)]
    if isinstance(node, yaml.MappingNode | None):
        return None
    raise NoPlace(f"{part} is to stand in a single value or in a list that has no such item")


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "plain" and node.value in ("", "null", "~")


class _Text:
    """A document, with marks as places in it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def replaced(
        self,
        holder: yaml.Node | None,
        name: yaml.Node | None,
        node: yaml.Node,
        value: Value,
        comments: Mapping[str, str],
    ) -> str:
        end = self._end(node)
        flow = holder is None or bool(getattr(holder, "flow_style", False))
        if name is None or flow:
            start = self._at(node.start_mark)
            return self._text[:start] + _in_brackets(value) + self._text[end:]
        colon = self._text.index(":", self._at(name.end_mark))
        line_end = self._line_end(end)
        # What is written behind the value, or behind the key of a mapping.
        behind = self._text[end:line_end].strip() or self._behind(colon, node)
        behind = f"  {behind}" if behind else ""
        if isinstance(value, str):
            return f"{self._text[: colon + 1]} {value}{behind}{self._text[line_end:]}"
        block = _block(value, comments, name.start_mark.column + 2)
        return f"{self._text[: colon + 1]}{behind}\n{block}{self._text[line_end:]}"

    def added(self, node: yaml.Node | None, key: Key, value: Value, comments: Mapping[str, str]) -> str:
        if not isinstance(node, yaml.MappingNode) or (not node.value and not node.flow_style):
            raise NoPlace(f"{dotted(key)} has no mapping to stand in")
        entry: Any = {str(key[0]): _nested(key[1:], value)}
        if node.flow_style:
            inside = _in_brackets(entry)[1:-1]
            end = self._end(node) - 1
            before = self._text[:end].rstrip()
            comma = "" if not node.value or before.endswith(",") else ", "
            return before + comma + inside + self._text[end:]
        end = self._line_end(max(self._end(each) for _, each in node.value))
        block = _block(entry, _deeper(comments, key), node.value[0][0].start_mark.column)
        return f"{self._text[:end]}\n{block}{self._text[end:]}"

    def _behind(self, colon: int, node: yaml.Node) -> str:
        """A comment between a key and its block."""
        between = self._text[colon + 1 : self._at(node.start_mark)].partition("\n")[0].strip()
        return between if between.startswith("#") else ""

    def _at(self, mark: yaml.Mark) -> int:
        return self._starts[mark.line] + mark.column

    def _end(self, node: yaml.Node) -> int:
        """After the last character of a node; marks of blocks end where the next token begins."""
        if isinstance(node, yaml.MappingNode) and node.value and not node.flow_style:
            return max(self._end(value) for _, value in node.value)
        if isinstance(node, yaml.SequenceNode) and node.value and not node.flow_style:
            return self._end(node.value[-1])
        start, end = self._at(node.start_mark), self._at(node.end_mark)
        return start + len(self._text[start:end].rstrip())

    def _line_end(self, place: int) -> int:
        found = self._text.find("\n", place)
        return len(self._text) if found < 0 else found


def _nested(key: Key, value: Value) -> Value:
    for part in reversed(key):
        value = {str(part): value}
    return value


def _deeper(comments: Mapping[str, str] | None, key: Key) -> dict[str, str]:
    return {f"{dotted(key)}.{name}": comment for name, comment in (comments or {}).items()}


def _block(value: Mapping[str, Any], comments: Mapping[str, str], indent: int) -> str:
    lines = _lines(value, comments, "")
    return "\n".join(" " * indent + line for line in lines)


def _lines(value: Mapping[str, Any], comments: Mapping[str, str], above: str) -> list[str]:
    lines = []
    for name, each in value.items():
        key = f"{above}{name}"
        comment = f"  # {comments[key]}" if key in comments else ""
        if isinstance(each, Mapping) and each:
            lines += [f"{name}:{comment}", *(f"  {line}" for line in _lines(each, comments, f"{key}."))]
        else:
            lines.append(f"{name}: {_scalar(each)}{comment}")
    return lines


def _in_brackets(value: Value) -> str:
    if not isinstance(value, Mapping):
        return _scalar(value)
    return "{" + ", ".join(f"{name}: {_in_brackets(each)}" for name, each in value.items()) + "}"


def _scalar(value: Any) -> str:
    """Text is YAML already."""
    return value if isinstance(value, str) else written({"v": value}, {}, "")[len("v: ") :].strip()


def plain(value: Any) -> Any:
    """A plain value as `edited` takes it: texts, also those inside, as the YAML that reads back as them."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return f"[{', '.join(_in_brackets(plain(each)) for each in value)}]"
    return written({"v": value}, {}, "")[len("v: ") :].strip()
