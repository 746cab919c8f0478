"""Losses as the window needs them: a sum, and over how many items, known before the forward."""

from __future__ import annotations

from shardkit.losses.adapting import adapt
from shardkit.losses.cross_entropy import CrossEntropy
from shardkit.losses.interface import Count, Loss
from shardkit.losses.squared_error import MeanSquaredError

__all__ = ["Count", "CrossEntropy", "Loss", "MeanSquaredError", "adapt"]
