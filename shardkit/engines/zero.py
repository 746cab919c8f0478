"""ZeRO as DeepSpeed 0.19.8 does it: its configuration, its start on a CPU, and its flat state by full name.

Used by every adapter that ends in a DeepSpeed engine. The state reads DeepSpeed's private attributes; the tested range
of versions is in pyproject.toml.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from shardkit.engines.api import EngineSettings, Interval, Kind, NamedParameters, StepReport, Traits
from shardkit.engines.names import frozen, full_name, persistent_buffers
from shardkit.engines.options import DeepSpeedOptions
from shardkit.engines.unused import GradientWatch, refuse_unused
from shardkit.errors import EngineError

SHARDED = {
    1: frozenset({"optimizer"}),
    2: frozenset({"optimizer", "gradients"}),
    3: frozenset({"optimizer", "gradients", "parameters"}),
}


def zero_traits(options: DeepSpeedOptions) -> Traits:
    """What holds for ZeRO however it was reached."""
    return Traits(
        shards=SHARDED[options.stage],
        reduces="once a window" if options.stage == 1 else "each micro-step",
        # Stage 3 frees a block's parameters between its submodules, also while a backward goes over it again.
        constant_memory=options.stage != 3,
        # bf16-true would need bf16 masters, which ZeRO keeps in fp32.
        precisions=frozenset({"fp32", "bf16-mixed"}),
        unused_parameters="refused when changed",
        # Flat partitions have no rows and columns (Adafactor, Muon) and no per-tensor norms (LAMB, LARS); DeepSpeed
        # 0.19.8 rebuilds Adagrad without its groups.
        refused_optimizers=frozenset({"Adafactor", "Adagrad", "Lamb", "LAMB", "LARS", "Muon"}),
    )


def prepare_deepspeed() -> Any:
    """Import DeepSpeed, quiet, and on plain gloo when there is no accelerator."""
    # It warns at its import that it found no accelerator, which this run knows, and logs each thing it configures.
    logging.disable(logging.WARNING)
    try:
        deepspeed = importlib.import_module("deepspeed")
    finally:
        logging.disable(logging.NOTSET)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    ops = importlib.import_module("deepspeed.ops")
    # On a CPU, DeepSpeed 0.19.8 compiles a shared-memory communication op at its first start, for minutes, under a
    # lock that outlives a killed process and is then waited on for ever. Plain gloo needs no compiler and no lock.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        # Adopts the torch process group that is there.
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def zero_config(settings: EngineSettings, options: DeepSpeedOptions) -> dict[str, Any]:
    """DeepSpeed's configuration, with each default that would change numbers written out."""
    zero: dict[str, Any] = {
        "stage": options.stage,
        "overlap_comm": options.overlap_comm,
        "reduce_bucket_size": options.reduce_bucket_size,
        "round_robin_gradients": options.round_robin_gradients,
        "stage3_param_persistence_threshold": options.stage3_param_persistence_threshold,
        "stage3_prefetch_bucket_size": options.stage3_prefetch_bucket_size,
        "stage3_max_live_parameters": options.stage3_max_live_parameters,
    }
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "train_batch_size": settings.micro_batch_size * settings.world.size,
        # shardkit owns the window: it says at each micro-step whether it is the last.
        "gradient_accumulation_steps": 1,
        # Absent would mean clipping at 1.0.
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        "wall_clock_breakdown": False,
    }
    if settings.precision == "bf16-mixed":
        # fp32 storage, reduction and masters under autocast, as on every backend. DeepSpeed's own "bf16" would also
        # make the buffers of norms bf16 and add gradients up in bf16. No module is named as safe for bf16
        # communication, so gradients are reduced in fp32.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return config


def zero_step(engine: Any) -> StepReport:
    """The step, and what DeepSpeed says of it only when asked: the norm, and whether it left the step out."""
    engine.step()
    applied = engine.was_step_applied()
    # After a step left out, the norm is the last one's (stage 3) or inf (stages 1 and 2).
    norm = engine.get_global_grad_norm() if applied else float("nan")
    return StepReport(grad_norm=float(norm), skipped=not applied)


class OutputWatch:
    """Refuses outputs that ZeRO 3 does not find the tensors in, by the module that returns them.

    It gathers a module's parameters for the backward by what it hooks on the module's output, and looks for tensors in
    tuples, lists and mappings only (DeepSpeed 0.19.8): the backward would meet empty parameters.
    """

    def __init__(self, model: nn.Module, stage: int) -> None:
        modules = model.named_modules() if stage == 3 else ()
        self._hooks = [module.register_forward_hook(self._hook(name)) for name, module in modules]

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, _inputs: Any, output: Any) -> None:
            kind = type(output)
            if is_dataclass(output) and not isinstance(output, Mapping):
                raise EngineError(
                    f"{name or 'the model'} ({type(module).__name__}) returns the dataclass {kind.__name__}, in which "
                    "stage 3 does not find the tensors it has to follow; return a tuple or a dict, or use fsdp2"
                )

        return look

    def stop(self) -> None:
        """After the first window: what a model returns does not change."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class UnusedWatch:
    """Refuses windows that give a parameter no gradient where ZeRO would change it all the same.

    A flat partition is updated whole: such a parameter is decayed, moved on by its momentum, and under stage 3
    (DeepSpeed 0.19.8) moved by the gradient of the last window that gave it one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: NamedParameters) -> None:
        # Before deepspeed.initialize, which replaces the optimizer's parameters.
        decayed = {id(p) for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
        self._decayed = {name for name, parameter in named if id(parameter) in decayed}
        self._seen: set[str] = set()
        self._watch = GradientWatch(named)

    def check(self) -> None:
        """Call before the step.

        Raises:
            EngineError: names what would be changed without a gradient.
        """
        arrived, missing = self._watch.window()
        refuse_unused(
            [name for name in missing if name in self._seen or name in self._decayed],
            "weight_decay 0 in parameter_groups for those that never get one; a backend for those that sometimes do "
            "is fsdp2, or ddp with find_unused_parameters",
        )
        self._seen |= arrived


def zero_state(engine: Any, model: nn.Module) -> Iterator[Interval]:
    """This rank's flat partitions as intervals: fp32 masters, optimizer tensors; then frozen parameters, buffers."""
    zero = engine.optimizer
    names = {id(parameter): full_name(name) for name, parameter in model.named_parameters()}
    pieces = _stage3_pieces if hasattr(zero, "fp16_groups") else _stage12_pieces
    for parameter, master, offset, start, length in pieces(zero):
        name, shape = names[id(parameter)], _shape(parameter)
        yield _interval("parameter", name, None, shape, start, master.narrow(0, offset, length))
        for key, value in zero.optimizer.state.get(master, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == master.shape:
                yield _interval("optimizer", name, key, shape, start, value.narrow(0, offset, length))
    for name, parameter in frozen(model):
        shard = getattr(parameter, "ds_tensor", None)
        if shard is None:
            yield _interval("parameter", name, None, _shape(parameter), 0, parameter.detach().reshape(-1), True)
            continue
        start, length = _own_range(zero, parameter)
        yield _interval("parameter", name, None, _shape(parameter), start, shard.narrow(0, 0, length))
    for name, buffer in persistent_buffers(model):
        yield _interval("buffer", name, None, tuple(buffer.shape), 0, buffer.reshape(-1), True)


Piece = tuple[nn.Parameter, torch.Tensor, int, int, int]
# (parameter, flat fp32 partition, where the piece starts in the partition, and in the parameter, its length)


def _stage12_pieces(zero: Any) -> Iterator[Piece]:
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(zero.real_dp_process_group[group])
        first = rank * zero.partition_size[group]
        last = first + zero.partition_size[group]
        # The flat buffer is laid out in round-robin order, also when that is the plain one.
        parameters, offsets = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group]
        for parameter, offset in zip(parameters, offsets, strict=True):
            begin, end = max(first, offset), min(last, offset + parameter.numel())
            if begin < end:
                yield parameter, master, begin - first, begin - offset, end - begin


def _stage3_pieces(zero: Any) -> Iterator[Piece]:
    for group in zero.fp16_groups:
        for parameter in group:
            index, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
            start, length = _own_range(zero, parameter)
            if length:
                yield parameter, zero.fp32_partitioned_groups_flat[index], offset, start, length


def _own_range(zero: Any, parameter: Any) -> tuple[int, int]:
    """Where this rank's part of a stage 3 parameter starts, and its length without padding."""
    size = parameter.partition_numel()
    start = zero._get_param_partition_rank(parameter) * size
    return start, max(0, min(size, parameter.ds_numel - start))


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _interval(
    kind: Kind,
    name: str,
    state: str | None,
    shape: tuple[int, ...],
    start: int,
    tensor: torch.Tensor,
    replicated: bool = False,
) -> Interval:
    assert start + tensor.numel() <= math.prod(shape)
    return Interval(
        kind=kind,
        name=name,
        state=state,
        shape=shape,
        start=start,
        tensor=tensor.detach(),
        copy=torch.distributed.get_rank() if replicated else 0,
        copies=torch.distributed.get_world_size() if replicated else 1,
    )


def close_zero(engine: Any) -> None:
    """Remove DeepSpeed's hooks from the model and let go of its buffers."""
    engine.destroy()
