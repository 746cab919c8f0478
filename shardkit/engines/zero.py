"""ZeRO as DeepSpeed 0.19.8 does it: its configuration, its start on a CPU, and its step.

Used by every adapter that ends in a DeepSpeed engine.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from shardkit.engines.anatomy import anatomy
from shardkit.engines.api import EngineSettings, StepReport, Traits
from shardkit.engines.knobs import resolved
from shardkit.engines.meaning import NONE, Meaning, Situation, clipping, short
from shardkit.engines.options import DeepSpeedOptions
from shardkit.engines.traffic import zero_least, zero_traffic
from shardkit.errors import EngineError
from shardkit.normalization.recomputed import is_recomputed

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
        counts_steps_by_group=True,
        offloads=options.offload_optimizer or options.offload_parameters,
        # Flat partitions have no rows and columns (Adafactor, Muon) and no per-tensor norms (LAMB, LARS); DeepSpeed
        # 0.19.8 rebuilds Adagrad without its groups.
        refused_optimizers=frozenset({"Adafactor", "Adagrad", "Lamb", "LAMB", "LARS", "Muon"}),
    )


def zero_meaning(situation: Situation, given: DeepSpeedOptions) -> Meaning:
    """What holds for ZeRO however it was reached; DeepSpeed keeps, gathers and reduces fp32 under every precision."""
    options = resolved(given, situation.anatomy)
    several = situation.world_size > 1
    place = "in host memory" if options.offload_optimizer else "beside the parameters"
    return Meaning(
        storage="fp32",
        compute=short(situation.computed),
        gather="fp32" if several else NONE,
        reduce="fp32" if several else NONE,
        masters=f"fp32 flat partitions {place}",
        norm_statistics="fp32",
        averages="DeepSpeed, before the reduction",
        clips=clipping(situation, "DeepSpeed, in its step"),
        nonfinite="DeepSpeed, which leaves the step out and is asked",
        traffic=zero_traffic(situation, options),
        least=zero_least(situation, options),
        notes=_notes(situation, options) if several else (),
        translated={
            "batch.micro_batch_size": f"train_micro_batch_size_per_gpu={situation.micro_batch_size}, told and not used",
            "train.max_grad_norm": f"gradient_clipping={situation.max_grad_norm or 0.0}",
            "train.precision": "torch_autocast, bfloat16" if situation.precision == "bf16-mixed" else "no autocast",
            **{f"backend.options.{key}": into for key, into in _options(options, given).items()},
        },
    )


def _notes(situation: Situation, options: DeepSpeedOptions) -> tuple[str, ...]:
    """What DeepSpeed 0.19.8 communicates otherwise than its papers say."""
    if options.stage == 3:
        least = options.stage3_param_persistence_threshold or 0
        again = any(w.recomputed and not w.trainable and w.numel > least for w in situation.anatomy.weights)
        # It lets go of them after the first backward of a block in which they were recomputed.
        frozen = ("frozen parameters of a block that is recomputed are gathered once more in its backward",)
        return (
            _freed(options),
            f"those of at most {least} elements stay whole, gathered once a step",
            "each parameter is padded to a multiple of the ranks",
            *(frozen if again else ()),
        )
    found = ["gradients are all-reduced, not reduce-scattered: twice as much on the wire as is needed"]
    if options.stage == 2 and situation.accumulation > 1:
        found.append("they are reduced each micro-step, as a rank keeps only its part of them")
    return (*found, "each flat group of the optimizer is padded")


def _freed(options: DeepSpeedOptions) -> str:
    distance = options.stage3_max_reuse_distance
    if not distance:
        return "parameters are freed after their use in the forward, and gathered again for the backward"
    return f"parameters used again within {distance} elements stay gathered until then, others are gathered again"


def _options(options: DeepSpeedOptions, given: DeepSpeedOptions) -> dict[str, str]:
    """Option -> what it becomes in DeepSpeed's configuration."""
    offloaded = {
        "offload_optimizer": "offload_optimizer.device=" + ("cpu" if options.offload_optimizer else "none"),
        "offload_parameters": "offload_param.device=" + ("cpu" if options.offload_parameters else "none"),
    }
    same = {f.name: f"{f.name}={getattr(options, f.name)}" for f in fields(options) if f.name not in offloaded}
    into = {key: f"zero_optimization.{into}" for key, into in {**same, **offloaded}.items()}
    for name in (f.name for f in fields(options)):
        if getattr(given, name) is None:
            used = getattr(options, name) is not None
            into[name] = f"{into[name]}, chosen from the model" if used else "not used in this stage"
    return into


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


def settled(options: DeepSpeedOptions, model: nn.Module, settings: EngineSettings) -> DeepSpeedOptions:
    """The options with the sizes of buffers that are chosen from this bare model."""
    return resolved(options, anatomy(model, settings.blocks, recomputed=filter(is_recomputed, model.modules())))


def zero_config(settings: EngineSettings, options: DeepSpeedOptions) -> dict[str, Any]:
    """DeepSpeed's configuration, with each default that would change numbers written out; `options` are resolved."""
    zero: dict[str, Any] = {
        "stage": options.stage,
        "overlap_comm": options.overlap_comm,
        "reduce_bucket_size": options.reduce_bucket_size,
        "round_robin_gradients": options.round_robin_gradients,
    }
    if options.stage == 3:
        zero |= {field.name: getattr(options, field.name) for field in fields(options) if field.name[:7] == "stage3_"}
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


def put_in_place(model: nn.Module, settings: EngineSettings, config: dict[str, Any]) -> None:
    """Put the model onto the device; stage 3 makes a parameter parts before the next is put there.

    Left to itself, DeepSpeed 0.19.8 has the whole model on the device first. An optimizer may have been built: the
    parameters stay the same objects.
    """
    if config["zero_optimization"]["stage"] == 3:
        importlib.import_module("deepspeed").zero.Init(module=model, config_dict_or_path=config)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(settings.world.device)
    else:
        model.to(settings.world.device)


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


def close_zero(engine: Any) -> None:
    """Remove DeepSpeed's hooks from the model and let go of its buffers."""
    engine.destroy()
