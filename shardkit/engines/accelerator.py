"""Hugging Face Accelerate, started so that it does what was asked and nothing else; for the accelerate-* adapters."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin

from shardkit.errors import EngineError
from shardkit.world import World


def start_accelerator(world: World, expected: set[DistributedType], **plugins: Any) -> Accelerator:
    """An Accelerator over the ranks of `world`, its own accumulation, precision and scheduler left unused.

    Raises:
        EngineError: Accelerate chose another kind of training than asked for, as it does without a word on a CPU; or
            this process has an Accelerator already.
    """
    refuse_second()
    # Without this, Accelerate trains N unconnected copies on a machine that has no accelerator (1.15); with
    # Accelerator(cpu=True) it drops its plugins and does plain DDP.
    PartialState(cpu=world.device.type == "cpu")
    return checked_accelerator(expected, **plugins)


def refuse_second() -> None:
    """Accelerate's state is global to the process, and a second Accelerator changes the first (1.15).

    Raises:
        EngineError: there is one.
    """
    if AcceleratorState._shared_state:
        raise EngineError(
            "this process has an Accelerator already, and a second one would change its settings; close the first "
            "engine (engine.close()) before opening another, or use one process each"
        )


def checked_accelerator(expected: set[DistributedType], **plugins: Any) -> Accelerator:
    """An Accelerator on the PartialState there is."""
    accelerator = Accelerator(
        mixed_precision="no",
        # The plugin, because the environment variable beats the plain argument (1.15).
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        **plugins,
    )
    if accelerator.distributed_type not in expected:
        names = " or ".join(sorted(kind.name for kind in expected))
        raise EngineError(f"Accelerate chose {accelerator.distributed_type.name}; expected {names}")
    return accelerator


def reset_accelerate() -> None:
    """Forget Accelerate's process-global state; the process group stays."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
