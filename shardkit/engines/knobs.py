"""The sizes of ZeRO's buffers, chosen from the model where a recipe leaves them open.

DeepSpeed's defaults are made for models of billions of parameters: a bucket of 5 x 10^8 elements is 2 GB on every rank,
whatever the model, and stage 3 keeps whole what it uses again within 10^9 elements, and every parameter of up to 10^5:
all of a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardkit.engines.anatomy import Anatomy
from shardkit.engines.options import DeepSpeedOptions

MOST = {
    "reduce_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
# DeepSpeed 0.19.8's defaults (runtime/zero/config.py), above which nothing is chosen.
SMALL = 2**18
# 1 MiB of fp32, as DistributedDataParallel's first bucket: what is smaller costs the latency of a collective alone.


def chosen(options: DeepSpeedOptions, anatomy: Anatomy) -> dict[str, int]:
    """Elements by option, for those that are open and have a meaning in the stage.

    - reduce_bucket_size: a tenth of what is trained, and no less than the largest parameter: few reductions, the first
      of which starts while the backward goes on. In stages 1 and 2 no less than 1 MiB, where there is so much; stage 3
      has it in the forward too.
    - stage3_param_persistence_threshold: a hundredth of the largest unit: norms and biases stay whole, and no matrix.
    - stage3_prefetch_bucket_size: a tenth of the largest unit, one of its matrices, is gathered ahead of its use;
      nothing where a unit has less than 1 MiB, as what is gathered is most of such a model.
    - stage3_max_live_parameters: nothing is gathered ahead while a unit is there. It bounds nothing else.
    - stage3_max_reuse_distance: 0, so that a parameter is freed after its forward, and gathered again for the backward,
      as fully_shard does; where blocks are recomputed, twice the largest of them, so that what is gathered to recompute
      a block is there for its backward.
    """
    units = anatomy.in_units()
    trained = [weight.numel for weight in anatomy.trainable]
    unit = max(sum(weight.numel for weight in unit) for unit in units)
    recomputed = max(sum(weight.numel for weight in unit if weight.recomputed) for unit in units)
    least = max(1, min(sum(trained), SMALL if options.stage < 3 else 1))
    sizes = {"reduce_bucket_size": max(least, max(trained, default=0), sum(trained) // 10)}
    if options.stage == 3:
        sizes |= {
            "stage3_param_persistence_threshold": unit // 100,
            "stage3_prefetch_bucket_size": unit // 10 if unit >= SMALL else 0,
            "stage3_max_live_parameters": unit,
            "stage3_max_reuse_distance": 2 * recomputed,
        }
    return {key: min(size, MOST[key]) for key, size in sizes.items() if getattr(options, key) is None}


def resolved(options: DeepSpeedOptions, anatomy: Anatomy) -> DeepSpeedOptions:
    """The same options with nothing open that has a meaning in the stage."""
    sizes: Mapping[str, int] = chosen(options, anatomy)
    return replace(options, **sizes)
