"""What each family of backends moves between ranks per optimizer step, from sizes alone.

psi is the number of bytes of all parameters, K the number of micro-steps of the window, W the number of ranks. The
volumes are those of a step once the libraries have made their plans: DistributedDataParallel sends the order of its
buckets in the second backward that communicates, and ZeRO 3 gathers every module's parameters by themselves until it
has seen one forward and backward. Bytes are counted as in `shardkit.communication`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardkit.communication import Traffic, Volume
from shardkit.engines.anatomy import Weight
from shardkit.engines.coordinator import gathered_elements
from shardkit.engines.meaning import Situation
from shardkit.engines.options import AccelerateFsdp2Options, DdpOptions, DeepSpeedOptions, Fsdp2Options

ALIGNMENT = 2
# ZeRO 1 and 2 pad a flat group to a multiple of this and the number of ranks (DeepSpeed 0.19.8).


def replicas_traffic(situation: Situation, options: DdpOptions) -> Traffic:
    """All-reduce of the gradients, psi once a window, in buckets of bucket_cap_mb without padding."""
    if situation.world_size == 1:
        return {}
    item = situation.stored.itemsize
    gradients = sum(weight.numel for weight in situation.anatomy.trainable) * item
    # Which parameters some rank used: one int32 each.
    used = 4 * len(situation.anatomy.trainable) if options.find_unused_parameters else 0
    return {"all_reduce": Volume(None, gradients + used)}


def fully_shard_traffic(
    situation: Situation, options: Fsdp2Options | AccelerateFsdp2Options, *, replicas: int = 1
) -> Traffic:
    """All-gather of each unit, 2 psi a micro-step (psi for what stays gathered); reduce-scatter of psi a window.

    What lies in no unit stays gathered between forward and backward. With `reduce_each_micro_step` gradients are
    reduced as often.

    Rows are padded to a multiple of the shards, parameter by parameter. With `replicas`, what a rank has left of the
    gradients is all-reduced over them. The norm of the gradient is an all-reduce of one number a parameter.
    """
    shards = situation.world_size // replicas
    mixed = situation.precision == "bf16-mixed"
    gathered, reduced = Volume(0, 0), Volume(0, 0)
    for weights, kept, dtype in _units(situation):
        times = 1 if kept or not options.reshard_after_forward else 2
        size = sum(weight.padded(shards) for weight in weights) * dtype.itemsize
        trained = [weight for weight in weights if weight.trainable]
        if weights:
            calls = times * situation.accumulation
            gathered += Volume(calls, size * calls)
        if trained:
            item = 4 if mixed else situation.stored.itemsize
            calls = situation.accumulation if options.reduce_each_micro_step else 1
            reduced += Volume(calls, sum(weight.padded(shards) for weight in trained) * item * calls)
    traffic: dict[str, Volume] = {}
    if shards > 1:
        traffic |= {"all_gather": gathered, "reduce_scatter": reduced}
    norm = Volume(1, len(situation.anatomy.trainable) * situation.stored.itemsize)
    if replicas > 1:
        traffic["all_reduce"] = Volume(reduced.calls, reduced.bytes // shards)
    if shards > 1:
        traffic["all_reduce"] = traffic.get("all_reduce", Volume(0, 0)) + norm
    return traffic


def zero_traffic(situation: Situation, options: DeepSpeedOptions) -> Traffic:
    """What DeepSpeed 0.19.8 does under shardkit's configuration, in fp32 under every precision.

    Stages 1 and 2: all-reduce of the gradients, psi once a window (1) or each micro-step (2), and all-gather of the
    updated parameters, psi a window, padded a group of the optimizer. Stage 3: all-gather of the parameters, 2 psi a
    micro-step but for what stays gathered from its forward to its backward (`shardkit.engines.coordinator`), and
    reduce-scatter of the gradients, psi a micro-step, each parameter padded to a multiple of the ranks; what is small
    enough to stay whole is gathered once a window instead. The norm of the gradient is an all-reduce of one number a
    group of the optimizer.

    Args:
        situation: with the model's layers.
        options: resolved.
    """
    if situation.world_size == 1:
        return {}
    if options.stage == 3:
        return _partitioned(situation, options)
    gradients = sum(weight.numel for weight in situation.anatomy.trainable) * 4
    reductions = 1 if options.stage == 1 else situation.accumulation
    groups = list(flat_groups(situation))
    return {
        "all_reduce": Volume(None, gradients * reductions + 4 * len(groups)),
        "all_gather": Volume(len(groups), sum(groups) * 4),
    }


def zero_least(situation: Situation, options: DeepSpeedOptions) -> Traffic:
    """What such a partition needs without padding: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7.

    Reduce-scatter of the gradients, psi once a window (stage 1) or each micro-step, and all-gather of the parameters,
    psi a window (stages 1 and 2) or 2 psi a micro-step (stage 3, which frees them after the forward).
    """
    if situation.world_size == 1:
        return {}
    gradients = sum(weight.numel for weight in situation.anatomy.trainable) * 4
    parameters = sum(weight.numel for weight in situation.anatomy.weights) * 4
    steps = situation.accumulation
    return {
        "reduce_scatter": Volume(None, gradients * (1 if options.stage == 1 else steps)),
        "all_gather": Volume(None, 2 * parameters * steps if options.stage == 3 else gradients),
    }


def fully_shard_least(
    situation: Situation, options: Fsdp2Options | AccelerateFsdp2Options, *, replicas: int = 1
) -> Traffic:
    """What such sharding needs without padding and norms: 2 psi a micro-step of what is freed after the forward, psi of
    what is not, and reduce-scatter of psi a window; over replicas all-reduce of what a rank has left of it.
    """
    shards = situation.world_size // replicas
    item = 4 if situation.precision == "bf16-mixed" else situation.stored.itemsize
    gradients = sum(weight.numel for weight in situation.anatomy.trainable) * item
    gathered = 0
    for weights, kept, dtype in _units(situation):
        times = 1 if kept or not options.reshard_after_forward else 2
        gathered += sum(weight.numel for weight in weights) * dtype.itemsize * times * situation.accumulation
    least: dict[str, Volume] = {}
    if shards > 1:
        least |= {"all_gather": Volume(None, gathered), "reduce_scatter": Volume(None, gradients)}
    if replicas > 1:
        least["all_reduce"] = Volume(None, gradients // shards)
    return least


def _units(situation: Situation) -> Iterable[tuple[list[Weight], bool, torch.dtype]]:
    """(weights, whether they stay gathered after the forward, dtype they are gathered in) of each unit."""
    apart = situation.precision == "bf16-mixed"
    *units, rest = situation.anatomy.in_units()
    for unit in units:
        yield [w for w in unit if not (apart and w.of_norm)], False, situation.computed
    norms = [w for w in situation.anatomy.weights if apart and w.of_norm]
    yield norms, True, situation.stored
    yield [w for w in rest if not (apart and w.of_norm)], True, situation.computed


def flat_groups(situation: Situation) -> Iterable[int]:
    """Elements of each flat group of the optimizer, padded."""
    sizes = {weight.name: weight.numel for weight in situation.anatomy.trainable}
    unit = ALIGNMENT * situation.world_size
    for group in situation.anatomy.groups:
        yield -(-sum(sizes[name] for name in group) // unit) * unit


def _partitioned(situation: Situation, options: DeepSpeedOptions) -> Traffic:
    ranks, steps = situation.world_size, situation.accumulation
    padded = {weight.name: -(-weight.numel // ranks) * ranks for weight in situation.anatomy.weights}
    least = options.stage3_param_persistence_threshold or 0
    # After the step; frozen ones with them.
    stay = sum(padded[weight.name] for weight in situation.anatomy.weights if weight.numel <= least)
    gathered = stay + steps * gathered_elements(situation.anatomy, options, steps, ranks)
    groups = len(situation.anatomy.groups)
    return {
        "all_gather": Volume(None, gathered * 4),
        "reduce_scatter": Volume(None, sum(padded[weight.name] for weight in situation.anatomy.trainable) * 4 * steps),
        # In fp64, but for the norm of offloaded gradients.
        "all_reduce": Volume(groups, groups * (4 if options.offload_optimizer else 8)),
    }
