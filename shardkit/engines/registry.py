"""Which adapters there are: name -> the class, its options, and the extra that brings what it needs.

No torch here. Third parties register an entry point in the group `shardkit.engines`, or are named in full as
`my_package.module:MyEngine`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.engines.options import (
    AccelerateFsdp2Options,
    DdpOptions,
    DeepSpeedOptions,
    Fsdp2Options,
    SingleOptions,
)
from shardkit.errors import BackendError

if TYPE_CHECKING:
    from shardkit.engines.api import Engine

ENTRY_POINTS = "shardkit.engines"


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One adapter that comes with shardkit."""

    target: str
    options: type
    needs: tuple[str, ...] = ()
    # Importable modules it cannot do without.
    extra: str = ""
    # What to pip install to have them.
    one_process: bool = False
    through: str = ""
    # The library that reaches another adapter's sharding, which needs as much memory.


BUILT_IN = {
    "single": Registration(target="shardkit.engines.single:SingleEngine", options=SingleOptions, one_process=True),
    "ddp": Registration(target="shardkit.engines.ddp:DdpEngine", options=DdpOptions),
    "fsdp2": Registration(target="shardkit.engines.fsdp2:Fsdp2Engine", options=Fsdp2Options),
    "deepspeed": Registration(
        target="shardkit.engines.deepspeed:DeepSpeedEngine",
        options=DeepSpeedOptions,
        needs=("deepspeed",),
        extra="deepspeed",
    ),
    "accelerate-ddp": Registration(
        target="shardkit.engines.accelerate_ddp:AccelerateDdpEngine",
        options=DdpOptions,
        needs=("accelerate",),
        extra="accelerate",
        through="Accelerate",
    ),
    "accelerate-fsdp2": Registration(
        target="shardkit.engines.accelerate_fsdp2:AccelerateFsdp2Engine",
        options=AccelerateFsdp2Options,
        needs=("accelerate",),
        extra="accelerate",
        through="Accelerate",
    ),
    "accelerate-deepspeed": Registration(
        target="shardkit.engines.accelerate_deepspeed:AccelerateDeepSpeedEngine",
        options=DeepSpeedOptions,
        # Accelerate 1.15 imports transformers on its DeepSpeed path.
        needs=("accelerate", "deepspeed", "transformers"),
        extra="accelerate,deepspeed,examples",
        through="Accelerate",
    ),
}


def names() -> list[str]:
    """Every registered adapter, those of third parties included."""
    return sorted({*BUILT_IN, *(point.name for point in _entry_points())})


def options_of(adapter: str) -> type | None:
    """The options dataclass of an adapter, or None when knowing it needs the adapter's own import.

    Raises:
        BackendError: no adapter has that name.
    """
    if adapter in BUILT_IN:
        return BUILT_IN[adapter].options
    target(adapter)
    return None


def target(adapter: str) -> str:
    """Where the adapter's class is, as `module:Class`.

    Raises:
        BackendError: no adapter has that name.
    """
    if adapter in BUILT_IN:
        return BUILT_IN[adapter].target
    for point in _entry_points():
        if point.name == adapter:
            return point.value
    if ":" in adapter:
        return adapter
    close = difflib.get_close_matches(adapter, names(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise BackendError(
        f"no adapter is named {adapter!r}; expected one of {', '.join(names())} or 'my_package.module:MyEngine'{hint}"
    )


def load(adapter: str) -> type[Engine]:
    """Import an adapter's class.

    Raises:
        BackendError: it is unknown, its extra is missing, or what the name leads to is no engine.
    """
    place = target(adapter)
    registration = BUILT_IN.get(adapter)
    if registration is not None:
        missing = [name for name in registration.needs if importlib.util.find_spec(name) is None]
        if missing:
            raise BackendError(
                f"backend adapter {adapter!r} needs {' and '.join(missing)}, which is not installed. "
                f"pip install 'shardkit[{registration.extra}]'"
            )
    module_name, _, class_name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend adapter {adapter!r}: cannot import {place!r}: {error}") from error
    members = ("Options", "describe", "micro_step", "backward", "step", "state", "scalars", "load_state")
    lacking = [name for name in members if not hasattr(found, name)]
    if lacking:
        raise BackendError(
            f"backend adapter {adapter!r}: {place!r} is no engine, it lacks {', '.join(lacking)}; "
            "expected a class with the members of shardkit.Engine"
        )
    return found


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))
