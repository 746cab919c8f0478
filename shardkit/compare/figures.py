"""The figures of a report, in the order of the page."""

from __future__ import annotations

from collections.abc import Mapping

from shardkit.compare.cost_figures import communication, memory, ratios, throughput
from shardkit.compare.curve_figures import apart, overlay
from shardkit.compare.verdict import Verdict
from shardkit.pages.drawing import Figure


def figures(found: Mapping[str, Verdict]) -> list[Figure]:
    """Those there are data for, in the order of the page."""
    drawn = (
        overlay(found, "loss", "Training loss", "loss"),
        apart(found, "loss", "Relative difference of the loss", "loss-difference"),
        overlay(found, "grad_norm", "Gradient norm before clipping", "grad-norm"),
        apart(found, "grad_norm", "Relative difference of the gradient norm", "grad-norm-difference"),
        overlay(found, "eval_loss", "Evaluation loss", "evaluation-loss"),
        throughput(found),
        ratios(found),
        memory(found),
        communication(found),
    )
    return [figure for figure in drawn if figure is not None]
