"""The arms of a comparison: a recipe and settings over it, each run as a job of its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.engines import registry
from shardkit.errors import RequestError
from shardkit.recipe.load import Loaded, load

_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class ArmRequest:
    """What one arm runs."""

    name: str
    # Of its folder, and in reports.
    recipe: str
    overrides: tuple[str, ...]

    def load(self, *more: str) -> Loaded:
        """Its recipe, resolved.

        Raises:
            RecipeError: all its problems.
        """
        return load(self.recipe, [*self.overrides, *more], options_of=registry.options_of)

    def command(self, *more: str) -> str:
        """What a person types to run it."""
        return shlex.join(["python", "-m", "shardkit.launch", self.recipe, *self.overrides, *more])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "overrides": list(self.overrides)}


def arms_of(
    recipe: str,
    overrides: Sequence[str],
    *,
    backends: Sequence[str] = (),
    arms: Sequence[str] = (),
    versus: Sequence[str] = (),
) -> list[ArmRequest]:
    """The arms a command line asks for, the first of them the reference.

    Args:
        recipe: path of the recipe.
        overrides: `key=value` for every arm.
        backends: an arm each.
        arms: "NAME: key=value key=value", an arm each with settings of its own.
        versus: other recipes, an arm each.

    Raises:
        RequestError: an arm has no name, or two have the same, or there are less than two.
    """
    common = tuple(overrides)
    found = [ArmRequest(name=name, recipe=recipe, overrides=on_backend(recipe, common, name)) for name in backends]
    if not backends:
        found.append(ArmRequest(name=_stem(recipe), recipe=recipe, overrides=common))
    for text in arms:
        name, _, settings = text.partition(":")
        if not _NAME.fullmatch(name.strip()) or "=" not in settings:
            raise RequestError(f"--arm {text!r} is no arm; expected 'NAME: key=value key=value'")
        try:
            words = shlex.split(settings)
        except ValueError as error:
            raise RequestError(f"--arm {text!r} cannot be split into words: {error}") from None
        found.append(ArmRequest(name=name.strip(), recipe=recipe, overrides=(*common, *words)))
    found += [ArmRequest(name=_stem(other), recipe=other, overrides=common) for other in versus]
    names = [arm.name for arm in found]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise RequestError(f"two arms are named {', '.join(doubled)}; give each a name of its own with --arm")
    if len(found) < 2:
        raise RequestError(
            "there is nothing to compare with: name two or more with --backends a,b, --arm 'NAME: key=value', or --vs "
            "other-recipe.yaml"
        )
    return found


def on_backend(recipe: str, overrides: Sequence[str], name: str) -> tuple[str, ...]:
    """The words that run a recipe on a backend, with the backend options of the command line.

    The recipe's own backend stays as it is, with the options it has there. One that has no such option refuses it when
    the words are loaded.
    """
    options = [word for word in overrides if is_option(word)]
    others = [word for word in overrides if not is_option(word)]
    try:
        own = load(recipe, others, options_of=registry.options_of).recipe.backend.name
    except RequestError:
        own = None  # told when the words are loaded
    return tuple(overrides) if name == own else (*others, f"backend={name}", *options)


def checked(
    requests: Mapping[ArmRequest, str], settings: Mapping[str, Sequence[str]] | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Every arm's recipe and number of processes, checked as a launch checks it, before anything is started.

    Args:
        requests: the arms, and what a line about one begins with.
        settings: over an arm's own, by its name, for the check alone.

    Raises:
        RequestError: what is wrong, one a line; what is not wrong with all, with its arm.
    """
    from shardkit.launch import preflight

    loaded: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    problems: dict[str, list[str]] = {}
    for arm, said in requests.items():
        try:
            loaded[arm.name] = arm.load()
            sizes[arm.name] = preflight.check(arm.load(*(settings or {}).get(arm.name, ()))).world_size
        except RequestError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(said)
    if problems:
        lines = [
            f"{said}{line}"
            for line, sayings in problems.items()
            for said in ([""] if len(sayings) == len(requests) else sayings)
        ]
        raise RequestError("\n".join(lines))
    return loaded, sizes


def refuse_decided(command: str, decided: Mapping[str, str], words: Sequence[str]) -> None:
    """Refuse settings of the command line that a command makes itself.

    Args:
        command: its name.
        decided: those settings, and what says them instead.
        words: `key=value` of the command line.

    Raises:
        RequestError: naming the first.
    """
    given = {word.partition("=")[0].strip() for word in words}
    for key, instead in decided.items():
        if key in given:
            raise RequestError(f"{key} is not for shardkit {command}: {instead}; leave it out")


def is_option(word: str) -> bool:
    """Whether a `key=value` gives an option of whatever backend there is."""
    return re.match(r"\s*backend\.options\b", word) is not None


def _stem(recipe: str) -> str:
    name = recipe.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
    return re.sub(r"[^\w.-]", "-", name) or "recipe"
