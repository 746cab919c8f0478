"""Blocks that are recomputed in the backward, in one process: what is chosen, refused, counted, kept and saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.compare.cause import cause, changes_maths
from shardkit.engines.activations import chosen_blocks
from shardkit.errors import BackendError, EngineError
from shardkit.memory import PeakBytes
from shardkit.recipe.schema import Exact, Normalization
from tests.comparisons import make_arm, make_run
from tests.unit.recipe.conftest import Refuse, load_text, refuse

__all__ = ["load_text", "refuse"]
DEPTH, WIDTH = 8, 6


class Spectral(nn.Module):
    """y = x times a buffer that each forward moves on, as the vectors of a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale = self.scale * 0.5 + 0.25
        return (x * self.scale).tanh()


class Block(nn.Module):
    """Two products of `width` with a norm, dropout, and a buffer that moves."""

    def __init__(self, width: int, dropout: float, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.moving, self.dropout, self.calls = Spectral(), nn.Dropout(dropout), 0

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        self.calls += 1
        y = self.dropout(self.moving(self.up(self.norm(x) * factor)))
        return x + self.down(nn.functional.silu(y))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, depth: int = DEPTH, dropout: float = 0.3, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(width, dropout, norm) for _ in range(depth)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, factor=0.9)
        return self.head(x)


def squared(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).float().square().sum(), len(x)


def opened(model: nn.Module, value: Any, **more: Any) -> shardkit.Engine:
    return shardkit.open_engine(
        "single",
        model,
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        max_grad_norm=0.5,
        activation_checkpointing=value,
        **more,
    )


def trained(value: Any, **more: Any) -> tuple[list[Any], dict[str, torch.Tensor], list[int]]:
    """Losses and norms of three windows, weights and buffers after them, calls of each block's own forward."""
    model = Net()
    engine = opened(model, value, **more)
    torch.manual_seed(2)
    seen = []
    for sizes in ((4, 4), (4, 3), (2,)):
        report = shardkit.train_step(engine, list(torch.randn(sum(sizes), WIDTH).split(sizes)), squared)
        seen += [report.loss, report.grad_norm]
    return seen, copy.deepcopy(model.state_dict()), [block.calls for block in model.blocks]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("policy", ["keep", "sync", "deferred", "exact", "frozen"])
def test_the_bits_are_those_of_the_run_without_it(policy: Any, precision: Any) -> None:
    more = {"normalization": policy, "precision": precision}
    seen, state, _ = trained("none", **more)
    passes = 3 if policy == "exact" else 5
    for value, step in (("blocks", 1), (1, 1), (2, 2), (5, 5)):
        got, kept, calls = trained(value, **more)
        assert got == seen
        assert all(torch.equal(kept[name], tensor) for name, tensor in state.items())
        # Exact recomputes every block that holds norms, and then once.
        again = [policy == "exact" or index % step == 0 for index in range(DEPTH)]
        assert calls == [passes * (1 + each) for each in again]
    if policy == "keep":
        assert state["blocks.0.norm.num_batches_tracked"] == 5


def test_nothing_is_recomputed_where_nothing_is_differentiated() -> None:
    model = Net()
    engine = opened(model, "blocks")
    with engine.inference():
        engine.model(torch.randn(3, WIDTH))
    assert [block.calls for block in model.blocks] == [1] * DEPTH


def test_a_deep_copy_recomputes_its_own_blocks() -> None:
    engine = opened(Net(), "blocks")
    twin = copy.deepcopy(engine.model)
    twin(torch.randn(3, WIDTH)).sum().backward()
    assert [block.calls for block in twin.blocks] == [2] * DEPTH
    assert [block.calls for block in engine.model.blocks] == [0] * DEPTH


def peak(value: Any) -> int:
    """Bytes of activations, gradients being there already."""
    model = Net(width=32, depth=12, dropout=0.0, norm=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    opened(model, value)
    x = torch.randn(256, 32)
    with PeakBytes() as used:
        model(x).square().sum().backward()
    return used.peak


def test_the_peak_is_lower_and_between_for_every_second_block() -> None:
    none, half, all_blocks, one = peak("none"), peak(2), peak("blocks"), peak(100)
    # Measured: 0.225, 0.568 and 0.921 of 3.7 MB, with all, half and one of 12 blocks recomputed.
    assert all_blocks / none == pytest.approx(0.225, abs=0.02)
    assert half / none == pytest.approx(0.568, abs=0.02)
    assert one / none == pytest.approx(0.921, abs=0.02)


def test_autocast_keeps_no_copies_of_the_weights_of_recomputed_blocks() -> None:
    held = {}
    for value in ("none", "blocks"):
        model = Net(width=64, depth=12, dropout=0.0)
        opened(model, value)
        with PeakBytes() as used, torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(2, 64))
            held[value] = used.current
    copies = sum(block.up.weight.numel() + block.down.weight.numel() for block in model.blocks) * 2
    # All of them, if they were kept; what the blocks were given is 6 kB.
    assert held["none"] > copies and held["blocks"] < copies / 20
    assert torch.is_autocast_cache_enabled()


class Twice(nn.Module):
    """Uses its weight two times over."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.product(self.product(x).relu())


def test_autocast_adds_up_the_gradients_of_a_weight_used_twice_in_a_block_as_without() -> None:
    gradients = []
    for value in ("none", "blocks"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Twice() for _ in range(3)))
        shardkit.open_engine(
            "single",
            model,
            lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            blocks=["*"],
            activation_checkpointing=value,
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0", "0 recomputes nothing; expected none, blocks, or a whole number"),
        ("-2", "-2 recomputes nothing; expected none, blocks, or a whole number"),
        ("layers", "'layers' is not one of none, blocks or a whole number"),
        ("true", "'true' is not one of none, blocks or a whole number"),
        ("1.5", "'1.5' is not one of none, blocks or a whole number"),
        ("[1]", "is a list; expected one of none, blocks or a whole number"),
    ],
)
def test_what_is_no_setting_is_refused_at_its_place(refuse: Refuse, value: str, said: str) -> None:
    (problem,) = refuse(extra=f"activation_checkpointing: {value}\n")
    assert (problem.place, problem.key) == ("recipe.yaml:14:1", "activation_checkpointing")
    assert said in problem.message


def test_constant_memory_is_refused_at_its_place(refuse: Refuse) -> None:
    section = "normalization: {policy: exact, exact: {memory: constant}}\n"
    (problem,) = refuse(extra=f"activation_checkpointing: 2\n{section}")
    assert (problem.place, problem.key) == ("recipe.yaml:14:1", "activation_checkpointing")
    assert "does not go with normalization.exact.memory: constant" in problem.message
    constant = Normalization(policy="exact", exact=Exact(memory="constant"))
    with pytest.raises(BackendError, match=r"activation_checkpointing: 2 does not go with"):
        opened(Net(), 2, normalization=constant)


@pytest.mark.parametrize("value", [0, -1, True, "layers", 1.5, None])
def test_what_is_no_setting_is_refused_of_an_own_loop_too(value: Any) -> None:
    with pytest.raises(BackendError, match=r"activation_checkpointing: .* expected none, blocks, or a whole number"):
        opened(Net(), value)


@pytest.mark.parametrize("value", ["blocks", 3])
def test_a_model_without_blocks_is_refused_before_it_is_touched(value: Any) -> None:
    model = nn.Linear(2, 2).double()
    with pytest.raises(BackendError, match=r"activation_checkpointing: no blocks are found in Linear.*`blocks`"):
        opened(model, value, normalization="sync")
    assert "forward" not in vars(model)
    with pytest.raises(BackendError, match=r"blocks: 'layers.\*' matches no module"):
        opened(Net(), value, blocks=["layers.*"])
    assert [name for name, _ in chosen_blocks(Net(), ["head", "blocks.?"], 3)] == ["blocks.0", "blocks.3", "blocks.6"]


def test_a_block_around_one_of_exact_is_refused_and_one_inside_is_recomputed_once() -> None:
    exact = Normalization(policy="exact", exact=Exact(blocks=["blocks.0.norm"]))
    with pytest.raises(BackendError, match=r"activation_checkpointing: block 'blocks.0' holds 'blocks.0.norm'"):
        opened(Net(), "blocks", normalization=exact)
    model = Net()
    exact = Normalization(policy="exact", exact=Exact(blocks=["blocks.*"]))
    opened(model, "blocks", blocks=["blocks.*.up"], normalization=exact)
    assert "forward" in vars(model.blocks[0]) and "forward" not in vars(model.blocks[0].up)


def test_a_forward_that_was_replaced_is_refused_by_name() -> None:
    model = Net()
    model.blocks[2].forward = lambda x: x
    with pytest.raises(BackendError, match=r"activation_checkpointing: the forward of block 'blocks.2' was replaced"):
        opened(model, "blocks")


class Fickle(nn.Module):
    """Cuts its input to another number of rows at each call, as a cache that grows does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor, *, factor: float) -> torch.Tensor:
        self.calls += 1
        return factor * self.layer(x[self.calls :]).tanh().sum(0, keepdim=True) + x


def test_a_block_that_takes_another_way_is_named_with_its_key() -> None:
    model = Net()
    model.blocks[4] = Fickle()
    engine = opened(model, "blocks")
    with pytest.raises(EngineError, match=r"^activation_checkpointing: block 'blocks.4' did not compute"):
        shardkit.train_step(engine, [torch.randn(4, WIDTH)], squared)


def test_a_difference_in_it_changes_no_maths_for_a_comparison() -> None:
    reference = make_arm("reference", [make_run()], {"recomputed": []}, activation_checkpointing="none")
    arm = make_arm("other", [make_run()], {"recomputed": ["blocks.0"]}, activation_checkpointing="blocks")
    assert not changes_maths(reference, arm)
    assert cause(reference, arm).startswith(
        "no setting that changes the maths differs (activation_checkpointing: none -> blocks)"
    )
