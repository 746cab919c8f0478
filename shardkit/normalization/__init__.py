"""BatchNorm that knows its logical batch, and the policy that puts it, or a substitute, into a model."""

from shardkit.normalization.auto import recommend
from shardkit.normalization.batch_norm import BatchNorm, Mode, commit, counting
from shardkit.normalization.moments import Moments
from shardkit.normalization.policy import apply_policy
from shardkit.normalization.report import Applied, Row
from shardkit.normalization.statistics import merge_running_statistics
from shardkit.normalization.tape import Tape

__all__ = [
    "Applied",
    "BatchNorm",
    "Mode",
    "Moments",
    "Row",
    "Tape",
    "apply_policy",
    "commit",
    "counting",
    "merge_running_statistics",
    "recommend",
]
