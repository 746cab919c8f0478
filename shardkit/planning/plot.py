"""A plan as a picture: stacked bars, one panel a number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardkit.pages.drawing import COLORS
from shardkit.planning.bars import PARTS, Bars


def plot(drawn: Sequence[Bars], path: Path, title: str) -> None:
    """Write the PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    heights = [0.9 + sum(0.42 + 0.16 * bar.name.count(", ") for bar in each.bars) for each in drawn] or [2.0]
    figure, panels = pyplot.subplots(
        len(heights), 1, figsize=(10, 1.2 + sum(heights)), height_ratios=heights, squeeze=False
    )
    for each, axes in zip(drawn, panels[:, 0], strict=True) if drawn else []:
        _panel(each, axes)
    if not drawn:
        panels[0, 0].text(0.5, 0.5, "of no choice is it known what it needs", ha="center")
        panels[0, 0].set_axis_off()
    figure.suptitle(title)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS[: len(PARTS)]]
    figure.legend(handles, PARTS, loc="lower center", ncols=len(PARTS), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.5 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _panel(drawn: Bars, axes: Any) -> None:
    axes.set_title(f"{drawn.title}; tick: with margin" + ("; dashed: the device" if drawn.limit else ""), fontsize=10)
    places = range(len(drawn.bars))
    left = [0.0] * len(drawn.bars)
    for part, color in zip(PARTS, COLORS, strict=False):
        widths = [bar.parts.get(part, 0) / drawn.unit for bar in drawn.bars]
        axes.barh(places, widths, left=left, height=0.6, color=color)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for place, bar in zip(places, drawn.bars, strict=True):
        axes.plot([bar.needs / drawn.unit] * 2, [place - 0.38, place + 0.38], color="black", linewidth=2)
        if bar.measured:
            axes.plot(bar.measured / drawn.unit, place, "o", markerfacecolor="none", color="black")
    if drawn.limit is not None:
        axes.axvline(drawn.limit / drawn.unit, color="gray", linestyle="--")
    axes.set_yticks(places, [bar.name.replace(", ", "\n") for bar in drawn.bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{drawn.unit_name} a rank", fontsize=8)
