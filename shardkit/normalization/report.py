"""What became of each norm layer of a model, as a table for people and as JSON for a checkpoint."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from itertools import zip_longest

from shardkit.normalization.batch_norm import BatchNorm

WIDTH = 100
# Columns of a terminal that a table has to fit.
_LIMITS = (34, 18, 20)
# Of layer, was and is; the reason has the rest.


@dataclass(frozen=True, kw_only=True)
class Row:
    """One norm layer; a layer that stands at several places has several names."""

    names: tuple[str, ...]
    old: str
    new: str
    why: str

    @property
    def layer(self) -> str:
        return ", ".join(name or "(the model)" for name in self.names)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a normalization policy did to a model."""

    policy: str
    # The one that was applied; what auto chose.
    rows: tuple[Row, ...] = ()
    layers: tuple[BatchNorm, ...] = ()
    # Our layers in the model, in its order: what `commit` takes.
    explanation: str = ""
    # Why auto chose it, in two sentences.

    def table(self) -> str:
        """A plain-text table of at most 100 columns; one line when the model has no norm layer."""
        lines = [f"normalization: {self.policy}"]
        lines += textwrap.wrap(self.explanation, WIDTH)
        if not self.rows:
            return "\n".join([*lines, "no norm layer in this model"]) + "\n"
        cells = [("layer", "was", "is", "why"), *((row.layer, row.old, row.new, row.why) for row in self.rows)]
        widths = [
            min(max(map(len, column)), limit) for column, limit in zip(zip(*cells, strict=True), _LIMITS, strict=False)
        ]
        widths.append(WIDTH - sum(widths) - 2 * len(widths))
        for row in cells:
            wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
            for parts in zip_longest(*wrapped, fillvalue=""):
                padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
                lines.append("  ".join(padded).rstrip())
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, object]:
        """What `json.dumps` takes: policy, explanation and rows."""
        return {"policy": self.policy, "explanation": self.explanation, "rows": [asdict(row) for row in self.rows]}
