"""Policy auto: which policy suits a run, among those that keep the model's function, and why."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.normalization.batch_norm import BatchNorm
from shardkit.recipe.schema import Policy

ENOUGH_ITEMS = 16
ENOUGH_VALUES = 32
# A batch gives steady statistics from so many items, and so many values a channel (items x positions), on. With 16
# images a GPU ImageNet's error is still that of 32, with 8 it is 1.2 points higher, with 2 11 points
# (Wu and He 2018, arXiv:1803.08494, table 2). Positions of one item resemble each other, so both are asked for.


def recommend(
    model: nn.Module,
    *,
    world_size: int,
    micro_batch_size: int,
    accumulation: int,
    pretrained: bool,
    spatial_size: int | None,
) -> tuple[Policy, str]:
    """A policy that keeps the model's function, and two sentences that say why.

    The first that applies:
        1. no BatchNorm that trains: keep.
        2. pretrained, and the whole logical batch is too small: frozen.
        3. one process, one micro-batch a step: keep, which is the large batch.
        4. one micro-batch a step: sync, which is the large batch over the ranks.
        5. a rank's micro-batch is large enough: deferred.
        6. else: exact.
    Where even the whole logical batch is too small, the second sentence names `group`, which changes the model.

    Args:
        model: bare or wrapped; it is only looked at.
        world_size: ranks.
        micro_batch_size: items a forward of one rank sees.
        accumulation: forwards of one rank in a logical batch.
        pretrained: the weights come from an earlier training.
        spatial_size: positions (H x W) of the smallest feature map that is normalised; None = unknown, taken as 1.
    """
    if not any(
        isinstance(m, _BatchNorm) and not (isinstance(m, BatchNorm) and m.mode == "frozen") for m in _all(model)
    ):
        return (
            "keep",
            "The model has no BatchNorm that trains. Nothing in it depends on the batch, so it is kept as it is.",
        )
    positions = spatial_size or 1
    logical = micro_batch_size * world_size * accumulation
    poor = not _enough(logical, positions)
    advice = (
        "; it is small for any BatchNorm: consider policy group, which changes the model and needs retraining"
        if poor
        else ""
    )
    if pretrained and poor:
        return "frozen", (
            f"The weights are pretrained, and a whole logical batch has {_items(logical)}, too few for statistics "
            f"(expected {ENOUGH_ITEMS} items and {ENOUGH_VALUES} values a channel). Frozen statistics are those the "
            f"weights were trained with, and do not suffer from it."
        )
    if world_size == 1 and accumulation == 1:
        return "keep", (
            f"One process sees the whole batch of {_items(logical)} in one forward. BatchNorm as the model has it "
            f"normalises by all of it{advice}."
        )
    if accumulation == 1:
        return "sync", (
            f"Each of {world_size} ranks sees {_items(micro_batch_size)} of a batch of {logical}. Synchronised "
            f"statistics are those of the whole batch, whatever the number of ranks{advice}."
        )
    if _enough(micro_batch_size, positions):
        return "deferred", (
            f"A logical batch of {_items(logical)} comes in {accumulation} micro-batches of {micro_batch_size} a rank, "
            f"each large enough to normalise by (at least {ENOUGH_ITEMS} items and {ENOUGH_VALUES} values a channel). "
            f"Running statistics move once a logical batch, as learning rate and momentum assume; exact would also "
            f"normalise by all of it, for more time."
        )
    return "exact", (
        f"A logical batch of {_items(logical)} comes in {accumulation} micro-batches of {micro_batch_size} a rank, "
        f"too small to normalise by (expected {ENOUGH_ITEMS} items and {ENOUGH_VALUES} values a channel). Exact "
        f"normalises by the whole logical batch, so that neither accumulation nor ranks show in the result{advice}."
    )


def _enough(items: int, positions: int) -> bool:
    return items >= ENOUGH_ITEMS and items * positions >= ENOUGH_VALUES


def _items(count: int) -> str:
    return f"{count} item" if count == 1 else f"{count} items"


def _all(model: nn.Module) -> list[nn.Module]:
    return list(model.modules())
