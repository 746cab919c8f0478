"""Replaces every ${...} by its value, once, when the recipe is loaded; OmegaConf does the resolving.

What a reference gives keeps its type. Text that comes from elsewhere, as from the environment, or that is put
together around references, is read as if it stood in the recipe without quotes: `${oc.env:X,3}` is a number.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationToMissingValueError, OmegaConfBaseException

from shardkit.recipe.expected import takes_null
from shardkit.recipe.fields import Reader, Reference
from shardkit.recipe.suggest import nearest
from shardkit.recipe.tree import Leaf, entries, tree_of

_SPAN = re.compile(r"(?<!\\)\$\{[^{}:]*\}")
_NO_SUCH_KEY = re.compile(r"Interpolation key '(.*?)' not found(?: \(resolved to '(.*?)'\))?")


def resolve(values: dict[str, Any], reader: Reader) -> None:
    """Put the value of each of the reader's references into `values`; the rest become its problems."""
    config = OmegaConf.create(values)
    references = [reference for reference in reader.references if _written(config, reference, reader)]
    for reference in _in_order(references):
        found = _look_up(config, values, reference, reader)
        _keep(config, values, reference, reader, found)


def escape(text: str) -> str:
    r"""Text that reads back as itself: ${ becomes \${."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def _in_order(references: list[Reference]) -> list[Reference]:
    """What is referred to comes before what refers to it, which then meets a value of the right type."""
    waiting = {tuple(map(str, reference.key)): reference for reference in references}
    ordered: list[Reference] = []

    def visit(key: tuple[str, ...]) -> None:
        reference = waiting.pop(key, None)
        if reference is None:
            return
        for span in _SPAN.findall(reference.leaf.value):
            wanted = _absolute(span, key)
            for other in [k for k in waiting if k[: len(wanted)] == wanted or wanted[: len(k)] == k]:
                visit(other)
        ordered.append(reference)

    for key in list(waiting):
        visit(key)
    return ordered


def _absolute(span: str, key: tuple[str, ...]) -> tuple[str, ...]:
    """The key a `${...}` at `key` refers to; each leading dot goes up one level."""
    path = span[2:-1].strip()
    name = path.lstrip(".")
    dots = len(path) - len(name)
    parts = tuple(part for part in re.split(r"[.\[\]]", name) if part)
    return (*key[: max(len(key) - dots, 0)], *parts) if dots else parts


def _refers_to_one_key(reference: Reference) -> bool:
    return _SPAN.fullmatch(reference.leaf.value) is not None


def _at(tree: Any, reference: Reference) -> Any:
    """What holds the reference's value."""
    for part in reference.key[:-1]:
        tree = tree[part]
    return tree


def _written(config: Any, reference: Reference, reader: Reader) -> bool:
    try:
        _at(config, reference)[reference.key[-1]] = reference.leaf.value
    except GrammarParseError as error:
        message = f"{reference.leaf.value!r} is not an interpolation: {str(error).splitlines()[0]}"
        reader.complain(reference.leaf.place, reference.key, f"{message}; write \\${{ where ${{ is meant as text")
        return False
    return True


def _look_up(config: Any, values: dict[str, Any], reference: Reference, reader: Reader) -> Any:
    """What the interpolation gives; MISSING when there is nothing to be had."""
    holder, name, text = _at(config, reference), reference.key[-1], reference.leaf.value
    try:
        found = holder[name]
        for span in _SPAN.findall(text):
            holder[name] = span
            if holder[name] is None and not (span == text and takes_null(reference.hint)):
                raise _Useless(f"{span} is null; give that key a value, or write a value here")
            if OmegaConf.is_config(holder[name]) and span != text:
                raise _Useless(f"{span} is a mapping or a list, which cannot be put into text")
        holder[name] = text
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except InterpolationToMissingValueError:  # a problem that is told where the value is missing
        pass
    except _Useless as useless:
        reader.complain(reference.leaf.place, reference.key, str(useless))
    except (OmegaConfBaseException, RecursionError) as error:
        message = _explain(str(error).splitlines()[0], text, values)
        reader.complain(reference.leaf.place, reference.key, message)
    holder[name] = MISSING
    return MISSING


def _keep(config: Any, values: dict[str, Any], reference: Reference, reader: Reader, found: Any) -> None:
    place = reference.leaf.place
    if isinstance(found, str) and found != MISSING and not _refers_to_one_key(reference):
        tree = Leaf(place, found, "plain" if found and "${" not in found else "value")
    elif found == MISSING:
        tree = Leaf(place, found, "broken")
    else:
        tree = tree_of(found, place)
    before = len(reader.problems)
    value = reader.read(tree, reference.hint, reference.key)
    for index in range(before, len(reader.problems)):
        problem = reader.problems[index]
        message = f"{problem.message} (it comes from {reference.leaf.value})"
        reader.problems[index] = replace(problem, message=message)
    _at(values, reference)[reference.key[-1]] = value
    if "${" not in str(value):
        _at(config, reference)[reference.key[-1]] = value


class _Useless(Exception):
    """What is referred to is there, and of no use in this place."""


def _explain(said: str, text: str, values: dict[str, Any]) -> str:
    if "Recursive" in said or "parent node" in said or "recursion" in said:
        return f"{text!r} leads back to itself; one of the keys on the way needs a value"
    if match := _NO_SUCH_KEY.search(said):
        key = match[2] or match[1]
        if re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            return f"{text!r}: there is no key {key!r}; write ${{oc.env:{key}}} for the environment variable"
        return f"{text!r}: there is no key {key!r}{_nearest_key(key, values)}"
    if "Environment variable" in said:
        name = said.split("'")[1]
        hint = f"set it, or write ${{oc.env:{name},default}}"
        return f"{text!r}: the environment variable {name} is not set; {hint}"
    return f"{text!r} cannot be resolved: {said}"


def _nearest_key(key: str, values: Any) -> str:
    """A hint that puts the first part that does not exist right."""
    parts = key.split(".")
    for depth, part in enumerate(parts):
        inside = {str(name): value for name, value in entries(values)}
        if part not in inside:
            near = nearest(part, inside)
            return f"; did you mean {'.'.join([*parts[:depth], near, *parts[depth + 1 :]])!r}?" if near else ""
        values = inside[part]
    return ""
