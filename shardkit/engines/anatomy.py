"""What of a bare model decides what a backend moves and keeps: its parameters, its units and the optimizer's groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.engines.names import full_name
from shardkit.engines.units import find_units
from shardkit.normalization.batch_norm import BatchNorm


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    of_norm: bool = False
    # It is the weight or bias of a BatchNorm of torch's own.
    recomputed: bool = False
    # It lies in a block that is recomputed in the backward.

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def padded(self, parts: int) -> int:
        """Elements when its rows (first dim) are cut into `parts` of one size."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // parts) * parts * (self.numel // rows if rows else 0)

    def rows_of(self, part: int, parts: int) -> tuple[int, ...]:
        """The shape of one of `parts` parts of its rows, of which the last ones may have fewer, or none."""
        if not self.shape:
            return (1,) if part == 0 else (0,)
        rows = -(-self.shape[0] // parts)
        return (max(0, min(rows, self.shape[0] - part * rows)), *self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A module that is called, and not a container of others alone."""

    path: str
    # "" is the model.
    weights: tuple[str, ...]
    # Full names of its own parameters, not those of modules inside it; a tied one in each place.
    recomputed: bool = False
    # It is a block that is recomputed in the backward.


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A model as a backend gets it, after the normalization policy."""

    weights: tuple[Weight, ...]
    # In the order of the model; a tied one once.
    units: tuple[tuple[str, ...], ...]
    # Full names of the parameters of each sharding unit that is no rest.
    groups: tuple[tuple[str, ...], ...]
    # Full names in each of the optimizer's param_groups.
    layers: tuple[Layer, ...] = ()
    # From the outside in and in the order of the model, the model first.

    @property
    def trainable(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.trainable)

    def in_units(self) -> tuple[tuple[Weight, ...], ...]:
        """The weights of each unit, and last the rest of the model's."""
        by_name = {weight.name: weight for weight in self.weights}
        taken = {name for unit in self.units for name in unit}
        rest = tuple(weight for weight in self.weights if weight.name not in taken)
        return (*(tuple(by_name[name] for name in unit) for unit in self.units), rest)


def anatomy(
    model: nn.Module,
    blocks: Sequence[str],
    groups: Iterable[Sequence[str]] | None = None,
    recomputed: Iterable[nn.Module] = (),
) -> Anatomy:
    """Look at a bare model, on any device, meta too.

    Args:
        model: after the normalization policy, before any backend.
        blocks: globs on the units; empty = found.
        groups: the optimizer's, by full names; None = one of all that is trained.
        recomputed: blocks that are recomputed in the backward.

    Raises:
        BackendError: a glob matches no module.
    """
    norms = {
        id(p)
        for m in model.modules()
        if isinstance(m, _BatchNorm) and not isinstance(m, BatchNorm)
        for p in m.parameters(recurse=False)
    }
    blocks_again = list(recomputed)
    again = {id(p) for block in blocks_again for p in block.parameters()}
    weights = tuple(
        Weight(
            name=full_name(name),
            shape=tuple(p.shape),
            dtype=p.dtype,
            trainable=p.requires_grad,
            of_norm=id(p) in norms,
            recomputed=id(p) in again,
        )
        for name, p in model.named_parameters()
    )
    names = {id(p): full_name(name) for name, p in model.named_parameters()}
    units = tuple(tuple(names[id(p)] for p in unit.parameters()) for _, unit in find_units(model, blocks))
    if groups is None:
        groups = [[weight.name for weight in weights if weight.trainable]]
    layers = tuple(
        Layer(
            path=full_name(path),
            weights=tuple(names[id(p)] for p in module.parameters(recurse=False)),
            recomputed=any(module is block for block in blocks_again),
        )
        for path, module in model.named_modules()
        if type(module).forward is not nn.Module.forward
    )
    return Anatomy(weights=weights, units=units, groups=tuple(map(tuple, groups)), layers=layers)
