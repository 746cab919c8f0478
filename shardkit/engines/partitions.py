"""ZeRO's flat partitions as intervals of named parameters: shown, and filled without a step.

They are private attributes of DeepSpeed 0.19.8; the tested range of versions is in pyproject.toml. Its own calls gather
whole tensors, know Adam's state only, and fail where sizes do not divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shardkit.engines.api import Interval, Kind, OptimizerState, Scalar
from shardkit.engines.footprint import Part
from shardkit.engines.kept import check_names, is_tensor, numbers, placed, refuse_pending, same_number
from shardkit.engines.names import frozen, full_name, persistent_buffers
from shardkit.engines.unused import UnusedWatch
from shardkit.engines.whole import pieces
from shardkit.errors import EngineError
from shardkit.world import World

# Elements compared or gathered at a time: a copy of them is all the memory it takes.
AT_ONCE = 4 * 2**20
CACHED = 2**20
# So many stay in a processor's cache together with what numpy makes of them.


class Piece(NamedTuple):
    """A part of one parameter that lies in a flat fp32 partition of this rank, without padding."""

    name: str
    parameter: Any
    master: torch.Tensor
    # The flat partition,
    offset: int
    # where the piece starts in it,
    start: int
    # where it starts in the parameter,
    length: int


class FlatGroup(NamedTuple):
    """Parameters whose optimizer state is one state, of one flat partition a rank; the same group on every rank."""

    master: torch.Tensor
    parameters: Sequence[Any]
    options: dict[str, Any]
    # Of torch's param_groups.


@dataclass(kw_only=True)
class Partitions:
    """The state of one DeepSpeed engine; `model` is the bare one inside of it."""

    engine: Any
    model: nn.Module
    world: World
    unused: UnusedWatch
    names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {id(parameter): full_name(name) for name, parameter in self.model.named_parameters()}

    @property
    def zero(self) -> Any:
        return self.engine.optimizer

    @property
    def whole(self) -> bool:
        """Stages 1 and 2 keep the parameters the model computes with whole."""
        return not hasattr(self.zero, "fp16_groups")

    def state(self) -> Iterator[Interval]:
        """fp32 masters and optimizer tensors, then frozen parameters and buffers.

        Raises:
            EngineError: gradients are pending, or a live weight is not the cast of its master.
        """
        refuse_pending(self.unused.pending)
        self._check_live()
        return self._intervals()

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        """The optimizer's numbers, which the parameters of a flat partition share."""
        state = self.zero.optimizer.state
        return {p.name: numbers(p.name, state[p.master]) for p in self._pieces() if state.get(p.master)}

    def held(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """`Engine.held`: in the step of the first flat group, when the gradients of the others still wait."""
        zero = self.zero
        masters = zero.single_partition_of_fp32_groups if self.whole else zero.fp32_partitioned_groups_flat
        for parameter in self.model.parameters():
            yield "parameters", getattr(parameter, "ds_tensor", parameter).detach()
        for buffer in self.model.buffers():
            yield "buffers", buffer
        for master in (*masters, *getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", ())):
            yield "masters", master.detach()
        for state in zero.optimizer.state.values():
            for value in filter(torch.is_tensor, state.values()):
                yield "optimizer", value
        found = [master.grad for master in masters]
        found += [tensor for group in zero.averaged_gradients.values() for tensor in group or ()]
        found += [
            getattr(zero, key, None) for key in ("grad_partitions_flat_buffer", "temp_grad_buffer_for_cpu_offload")
        ]
        found += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        for tensor in found:
            if tensor is not None:
                yield "gradients", tensor

    @contextmanager
    def load(self, kept: Mapping[str, OptimizerState] | None) -> Iterator[Iterable[Interval]]:
        """`Engine.load_state`.

        Raises:
            EngineError: gradients are pending, or the parameters of a flat partition have different numbers.
        """
        refuse_pending(self.unused.pending)
        groups = list(self._groups())
        if kept is not None:
            check_names(kept, [self.names[id(p)] for group in groups for p in group.parameters])
            shared = [self._shared(group, kept) for group in groups]
            for group, state in zip(groups, shared, strict=True):
                self._replace_state(group, state)
        if not self.whole:
            # Whole parameters that stay on a rank would hide what is written into their parts.
            self.zero.checkpoint_event_prologue()
        yield self._intervals()
        self._refresh()
        if kept is not None:
            self.unused.restart(self._moved())

    def _groups(self) -> Iterator[FlatGroup]:
        zero = self.zero
        options = zero.optimizer.param_groups
        if self.whole:
            for index, master in enumerate(zero.single_partition_of_fp32_groups):
                yield FlatGroup(master, zero.round_robin_bit16_groups[index], options[index])
            return
        for index, parameters in enumerate(zero.fp16_groups):
            group = options[zero.sub_group_to_group_id[index]]
            yield FlatGroup(zero.fp32_partitioned_groups_flat[index], parameters, group)

    def _pieces(self) -> Iterator[Piece]:
        return self._pieces_of_whole() if self.whole else self._pieces_of_shards()

    def _pieces_of_whole(self) -> Iterator[Piece]:
        zero = self.zero
        for group, master in enumerate(zero.single_partition_of_fp32_groups):
            first = torch.distributed.get_rank(zero.real_dp_process_group[group]) * zero.partition_size[group]
            last = first + zero.partition_size[group]
            # The flat buffer is laid out in round-robin order, also when that is the plain one.
            parameters, offsets = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                begin, end = max(first, offset), min(last, offset + parameter.numel())
                if begin < end:
                    name = self.names[id(parameter)]
                    yield Piece(name, parameter, master, begin - first, begin - offset, end - begin)

    def _pieces_of_shards(self) -> Iterator[Piece]:
        zero = self.zero
        for group in zero.fp16_groups:
            for parameter in group:
                index, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
                start, length = self._own_range(parameter)
                if length:
                    master = zero.fp32_partitioned_groups_flat[index]
                    yield Piece(self.names[id(parameter)], parameter, master, offset, start, length)

    def _own_range(self, parameter: Any) -> tuple[int, int]:
        """Where this rank's part of a stage 3 parameter starts, and its length without padding."""
        size = parameter.partition_numel()
        start = self.zero._get_param_partition_rank(parameter) * size
        return start, max(0, min(size, parameter.ds_numel - start))

    def _intervals(self) -> Iterator[Interval]:
        optimizer = self.zero.optimizer
        for piece in self._pieces():
            yield _interval("parameter", piece, None, piece.master)
            for key, value in optimizer.state.get(piece.master, {}).items():
                if is_tensor(value):
                    yield _interval("optimizer", piece, key, value)
        for name, parameter in frozen(self.model):
            shard = getattr(parameter, "ds_tensor", None)
            if shard is None:
                yield from pieces("parameter", name, None, parameter.detach(), self.world)
                continue
            start, length = self._own_range(parameter)
            if length:
                yield _interval("parameter", Piece(name, parameter, shard, 0, start, length), None, shard)
        for name, buffer in persistent_buffers(self.model):
            yield from pieces("buffer", name, None, buffer.detach(), self.world)

    def _check_live(self) -> None:
        """The model computes with copies; a step replaces them by the masters, and a change of them would be lost."""
        for piece in self._pieces():
            master = piece.master.detach().narrow(0, piece.offset, piece.length)
            for live in self._live(piece):
                if not _equal(live, master):
                    raise EngineError(
                        f"{piece.name}: the weights the model computes with are not those the optimizer updates, and "
                        "the next step would overwrite them; change weights before open_engine, or through load_state"
                    )

    def _live(self, piece: Piece) -> Iterator[torch.Tensor]:
        parameter = piece.parameter
        if not self.whole:
            yield parameter.ds_tensor.detach().narrow(0, 0, piece.length)
        if self.whole or parameter.ds_status.name == "AVAILABLE":
            yield parameter.detach().view(-1).narrow(0, piece.start, piece.length)

    def _shared(self, group: FlatGroup, kept: Mapping[str, OptimizerState]) -> OptimizerState | None:
        """What the parameters of a group keep together; one without state gets zeros where others have some."""
        tensors: dict[str, tuple[str, torch.dtype]] = {}
        scalars: dict[str, tuple[str, Scalar]] = {}
        held = [(self.names[id(p)], _shape(p)) for p in group.parameters if self.names[id(p)] in kept]
        for name, shape in held:
            for key, (given, dtype) in kept[name].tensors.items():
                if given != shape:
                    raise EngineError(
                        f"ZeRO keeps optimizer state in flat partitions, and {key!r} of {name} has the shape {given}, "
                        f"not the parameter's {shape}; use a backend that keeps parameters whole, as ddp"
                    )
                other, known = tensors.setdefault(key, (name, dtype))
                if known != dtype:
                    raise _different(key, other, str(known), name, str(dtype))
            for key, value in kept[name].scalars.items():
                other, known = scalars.get(key, (name, None))
                if known is None:
                    scalars[key] = (name, value)
                elif value is not None and not same_number(known, value):
                    raise _different(key, other, f"{known}", name, f"{value}")
        if not held:
            return None
        return OptimizerState(
            tensors={key: (tuple(group.master.shape), dtype) for key, (_, dtype) in tensors.items()},
            scalars={key: value for key, (_, value) in scalars.items() if key not in tensors},
        )

    def _replace_state(self, group: FlatGroup, kept: OptimizerState | None) -> None:
        state = self.zero.optimizer.state
        before = state.pop(group.master, {})
        if kept is None:
            return
        made: dict[str, Any] = {}
        for key, (_, dtype) in kept.tensors.items():
            there = before.get(key)
            # Used again: DeepSpeed's views of it would keep it alive beside a new one.
            reused = is_tensor(there) and there.shape == group.master.shape and there.dtype == dtype
            made[key] = there.zero_() if reused else torch.zeros_like(group.master, dtype=dtype, requires_grad=False)
        for key, value in kept.scalars.items():
            made[key] = placed(key, value, group.options, group.master.device)
        state[group.master] = made

    def _refresh(self) -> None:
        """What the model computes with, from the masters; a collective."""
        zero = self.zero
        if not self.whole:
            for index in range(len(zero.fp16_groups)):
                # Also points the parameters' parts into the flat buffer, as after a step.
                zero._reassign_or_swap_out_partitioned_parameters(index)
            # Gathers the parameters that stay whole.
            zero.checkpoint_event_epilogue()
            return
        self._gather_low_precision()
        # DeepSpeed's own views of the optimizer's state are of the dropped one; else it makes them at the next step.
        zero._hp_optimizer_states_linked = False
        if all(group.master in zero.optimizer.state for group in self._groups()):
            zero._lazy_init_hp_params_optimizer_state()

    def _gather_low_precision(self) -> None:
        """What DeepSpeed's update_lp_params does, in pieces: at once, gloo takes twice the whole weights for it."""
        zero = self.zero
        groups = zip(
            zero.parallel_partitioned_bit16_groups,
            zero.single_partition_of_fp32_groups,
            zero.real_dp_process_group,
            strict=True,
        )
        for partitions, master, ranks in groups:
            own = partitions[torch.distributed.get_rank(ranks)].data
            own.copy_(master.data)
            if len(partitions) == 1:
                continue
            for start in range(0, own.numel(), AT_ONCE):
                length = min(AT_ONCE, own.numel() - start)
                parts = [partition.data.narrow(0, start, length) for partition in partitions]
                torch.distributed.all_gather(parts, own.narrow(0, start, length), group=ranks)

    def _moved(self) -> set[str]:
        """The parameters that some window gave a gradient: those with a tensor that is not zero, on any rank."""
        names = [self.names[id(p)] for group in self._groups() for p in group.parameters]
        state = self.zero.optimizer.state
        own = {
            piece.name
            for piece in self._pieces()
            for value in state.get(piece.master, {}).values()
            if is_tensor(value) and bool(value.narrow(0, piece.offset, piece.length).any())
        }
        flags = torch.tensor([float(name in own) for name in names], device=self.world.device)
        return {name for name, flag in zip(names, self.world.sum(flags).tolist(), strict=True) if flag}


def _interval(kind: Kind, piece: Piece, state: str | None, flat: torch.Tensor) -> Interval:
    return Interval(
        kind=kind,
        name=piece.name,
        state=state,
        shape=_shape(piece.parameter),
        start=piece.start,
        tensor=flat.detach().narrow(0, piece.offset, piece.length),
    )


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _equal(live: torch.Tensor, master: torch.Tensor) -> bool:
    for part, wanted in zip(live.split(AT_ONCE), master.split(AT_ONCE), strict=True):
        cast = wanted.to(device=part.device, dtype=part.dtype)
        # NaN is not equal to itself.
        if not _same_bits(part, cast) and not torch.isclose(part, cast, rtol=0, atol=0, equal_nan=True).all():
            return False
    return True


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal, in half the time on a CPU: each save does this over all weights of a rank."""
    if a.device.type != "cpu" or a.dtype != torch.float32:
        return torch.equal(a, b)
    one, other = a.view(torch.int32).numpy(), b.view(torch.int32).numpy()
    return all(
        np.array_equal(one[start : start + CACHED], other[start : start + CACHED])
        for start in range(0, len(one), CACHED)
    )


def _different(key: str, one: str, its: str, other: str, others: str) -> EngineError:
    return EngineError(
        f"ZeRO keeps one {key!r} for all parameters of a flat partition, and it is {its} for {one} but {others} for "
        f"{other}; give them a parameter group each, or use a backend that keeps them apart, as fsdp2"
    )
