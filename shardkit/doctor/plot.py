"""The diagnosis as a picture: the delta of each layer, and memory over accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit.doctor.delta import MEAN_BADLY, MEAN_OK, VARIANCE_OK
from shardkit.doctor.diagnosis import Diagnosis
from shardkit.doctor.flatness import ACCUMULATIONS

MOST_LAYERS = 40
# More do not fit on a page; the worst are shown.


def plot(diagnosis: Diagnosis, path: Path) -> None:
    """Write the PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    height = max(4.0, 1.5 + 0.25 * min(len(diagnosis.layers), MOST_LAYERS))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, height), width_ratios=[3, 2])
    _layers(diagnosis, left)
    _memory(diagnosis, right)
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _layers(diagnosis: Diagnosis, axes: Any) -> None:
    layers = diagnosis.layers[:MOST_LAYERS][::-1]
    axes.set_title(f"Statistics delta of one cycle, policy {diagnosis.policy}")
    if not layers:
        axes.text(0.5, 0.5, "no layer to compare", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    rows = range(len(layers))
    means = [max(d.mean_delta or 0.0, d.settled_mean_delta or 0.0) for d in layers]
    # On the scale of the mean: what is just ok is at one place for both.
    scale = MEAN_OK / VARIANCE_OK
    variances = [scale * max(d.variance_delta or 0.0, d.settled_variance_delta or 0.0) for d in layers]
    axes.barh([row + 0.2 for row in rows], means, height=0.38, label="mean (standard deviations)")
    axes.barh([row - 0.2 for row in rows], variances, height=0.38, label=f"variance (ratio - 1, x {scale:g})")
    axes.axvline(MEAN_OK, color="gray", linestyle="--", linewidth=1, label="ok up to here")
    axes.axvline(MEAN_BADLY, color="gray", linewidth=1, label="badly from here")
    axes.set_yticks(list(rows), [delta.name for delta in layers], fontsize=8)
    axes.set_xlabel("against one large batch; the worse of becoming and settling")
    axes.legend(fontsize=8, loc="lower right")


def _memory(diagnosis: Diagnosis, axes: Any) -> None:
    axes.set_title(f"Peak of one window, micro-batches of {diagnosis.micro_batch_size}")
    for flat in diagnosis.memory:
        places = [index for index, count in enumerate(ACCUMULATIONS) if count in flat.peak_bytes]
        peaks = [flat.peak_bytes[ACCUMULATIONS[index]] / 2**20 for index in places]
        if peaks:
            axes.plot(places, peaks, marker="o", label=f"{flat.policy}: {flat.verdict}")
    axes.set_xticks(range(len(ACCUMULATIONS)), [str(count) for count in ACCUMULATIONS])
    axes.set_xlabel("accumulation")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(fontsize=8)
