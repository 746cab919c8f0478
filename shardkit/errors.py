"""The errors a user can meet, and the exit code each one ends a run with.

ShardkitError                 1
|-- RequestError              2   what was asked cannot be done; nothing was started
|   |-- RecipeError               the recipe has problems, each with its place
|   |-- BackendError              a backend is missing, or cannot honour a setting
|   `-- NormalizationError        a norm layer cannot become what the policy asks for
|-- DataError                 1   the data set or a batch is not what the loop can train on
|-- WindowError               1   the micro-batches of a window do not fit together
|-- CheckpointError           1   a checkpoint cannot be written, read or fitted to this run
|-- EngineError               1   the backend met something it would get wrong in silence
`-- NonFiniteError            1   a loss or a gradient is NaN or infinite
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ShardkitError(Exception):
    """Anything shardkit refuses or cannot finish; the message says where, what, expected, what to do."""

    exit_code = 1


class RequestError(ShardkitError):
    """What was asked cannot be done; known before any process starts."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, order=True)
class Problem:
    """One mistake in a recipe: its place (`path:line:col` or `command line 'k=v'`), key and explanation."""

    place: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


class RecipeError(RequestError):
    """All problems of a recipe, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class BackendError(RequestError):
    """A backend is unknown, not installed, or cannot honour a setting on this machine."""


class NormalizationError(RequestError):
    """A norm layer cannot become what the policy asks for without losing something, or it is too late."""


class DataError(ShardkitError):
    """The data set or a batch is not what the loop can train on."""


class WindowError(ShardkitError):
    """The micro-batches of one window do not fit together, on this rank or over the ranks."""


class CheckpointError(ShardkitError):
    """A checkpoint cannot be written, is damaged, or does not fit the model, the optimizer or the data."""


class EngineError(ShardkitError):
    """The backend met something it would get wrong in silence."""


class NonFiniteError(ShardkitError):
    """A loss or a gradient is NaN or infinite, and the recipe asks for an error."""
