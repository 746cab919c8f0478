from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardkit
from shardkit.errors import BackendError, WindowError
from shardkit.memory import PeakBytes
from shardkit.normalization import host
from shardkit.normalization.host import HostBatch, OnHost
from shardkit.recipe.schema import Exact, Normalization

CONSTANT = Normalization(policy="exact", exact=Exact(memory="constant"))
BLOCKS = Normalization(policy="exact", exact=Exact(offload=False))
HOST = Normalization(policy="exact", exact=Exact(offload=True))


class Block(nn.Module):
    def __init__(self, channels: int, *, dropout: float = 0.0, inlet: int | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inlet or channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.dropout(F.silu(self.norm1(self.conv1(x))), self.dropout)))
        return y if x.shape[1] != y.shape[1] else x + y


class Outlet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean((2, 3)))


def net(
    *, dropout: float = 0.0, channels: int = 6, depth: int = 4, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    torch.manual_seed(0)
    inner = [Block(channels, dropout=dropout) for _ in range(depth)]
    return nn.Sequential(Block(channels, inlet=3), *inner, Outlet(channels)).to(dtype)


def window(sizes: list[int], *, side: int = 6, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(1)
    x = torch.randn(sum(sizes), 3, side, side, dtype=dtype)
    return list(zip(x.split(sizes), torch.randn(sum(sizes), 2, dtype=dtype).split(sizes), strict=True))


def squared(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def step(
    policy: Any, sizes: list[int], *, blocks: list[str] | None = None, **more: Any
) -> tuple[float, dict[str, Any], int]:
    """Loss, gradients and peak bytes of one window."""
    data = {name: more.pop(name) for name in ("side",) if name in more}
    model = more.pop("model", None) or net(**more)
    dtype = next(model.parameters()).dtype
    engine = shardkit.open_engine(
        "single",
        model,
        lambda named: torch.optim.SGD([p for _, p in named], lr=1.0, momentum=0.9),
        blocks=blocks or ["?"],
        normalization=policy,
    )
    batches = window(sizes, dtype=dtype, **data)
    torch.manual_seed(2)
    with PeakBytes() as memory:
        report = shardkit.train_step(engine, batches, squared)
    gradients = {n: engine.optimizer.state[p]["momentum_buffer"] for n, p in model.named_parameters()}
    assert report.loss is not None
    return report.loss, gradients, memory.peak


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("policy", [BLOCKS, HOST, CONSTANT], ids=["blocks", "host", "constant"])
@pytest.mark.parametrize("sizes", [[8], [3, 1, 4], [2, 0, 6]])
def test_a_window_is_the_large_batch(policy: Any, sizes: list[int]) -> None:
    loss, gradients, _ = step(policy, sizes)
    want_loss, want, _ = step("keep", [sum(sizes)])
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert apart(gradients, want) < 1e-12


def test_the_peak_does_not_grow_with_the_number_of_micro_batches() -> None:
    shape: dict[str, Any] = {"channels": 8, "side": 16, "dtype": torch.float32}
    batch = 4 * 3 * 16 * 16 * 4
    peaks = [step(CONSTANT, [4] * k, **shape)[2] - k * batch for k in (2, 4, 8)]
    assert max(peaks) < 1.02 * min(peaks), peaks
    # So that the test can fail: a block of the whole window does grow.
    grows = [step(HOST, [4] * k, **shape)[2] for k in (2, 8)]
    assert grows[1] > 2 * grows[0]


def test_auto_moves_to_the_host_what_comes_when_memory_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, shape = Normalization(policy="exact"), {"channels": 8, "side": 16, "dtype": torch.float32}
    plenty = step(auto, [4] * 4, **shape)[2]
    assert plenty == step(BLOCKS, [4] * 4, **shape)[2]
    monkeypatch.setattr(host, "scarce", lambda device: True)
    loss, gradients, scarce = step(auto, [4] * 4, **shape)
    assert scarce == step(HOST, [4] * 4, **shape)[2] < 0.8 * plenty
    assert loss == pytest.approx(step(BLOCKS, [4] * 4, **shape)[0], rel=1e-6)
    assert apart(gradients, step(BLOCKS, [4] * 4, **shape)[1]) < 1e-5


def test_dropout_is_the_same_in_every_pass() -> None:
    # If it were not, the gradient would not be the slope of the loss that was reported.
    torch.manual_seed(0)
    model = net(dropout=0.5, depth=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss, gradients, _ = step(CONSTANT, [3, 2], model=model)
    epsilon, name = 1e-6, "1.conv1.weight"
    direction = torch.randn_like(before[name])
    moved = net(dropout=0.5, depth=2)
    with torch.no_grad():
        for key, p in moved.named_parameters():
            p.copy_(before[key] + (epsilon * direction if key == name else 0.0))
    shifted, _, _ = step(CONSTANT, [3, 2], model=moved)
    assert (shifted - loss) / epsilon == pytest.approx(float((gradients[name] * direction).sum()), rel=1e-3)


def test_bf16_is_the_precision_of_the_first_pass_in_every_pass() -> None:
    def run(policy: Any) -> tuple[float, dict[str, Any]]:
        model = net(dtype=torch.float32)
        engine = shardkit.open_engine(
            "single",
            model,
            lambda named: torch.optim.SGD([p for _, p in named], lr=1.0, momentum=0.9),
            blocks=["?"],
            normalization=policy,
            precision="bf16-mixed",
        )
        report = shardkit.train_step(engine, window([3, 5], dtype=torch.float32), squared)
        assert report.loss is not None
        return report.loss, {n: engine.optimizer.state[p]["momentum_buffer"] for n, p in model.named_parameters()}

    (loss, gradients), (want, reference) = run(CONSTANT), run(BLOCKS)
    assert loss == pytest.approx(want, rel=1e-3)
    for name, value in reference.items():
        assert (gradients[name] - value).norm() <= 2e-2 * value.norm() + 1e-4, name


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + y


class Holder(nn.Module):
    def __init__(self, block: nn.Module, call: Any) -> None:
        super().__init__()
        self.block, self.outlet, self.call = block, Outlet(3), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.call(self.block, x))


class Fickle(nn.Module):
    """Takes its second norm for large micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x)
        return self.norm2(x) if len(x) > 2 else x


@pytest.mark.parametrize(
    ("block", "call", "said"),
    [
        (TwoInputs(), lambda block, x: block(x, x), "more than one tensor"),
        (
            nn.Sequential(nn.BatchNorm2d(3)),
            lambda block, x: block(x.flatten(0, 1)[:, None].expand(-1, 3, -1, -1)),
            "rows",
        ),
        (Fickle(), lambda block, x: block(x), "another micro-batch"),
    ],
)
def test_what_cannot_be_sliced_is_refused_by_the_name_of_its_block(block: nn.Module, call: Any, said: str) -> None:
    with pytest.raises(WindowError, match=f"block 'block'.*{said}"):
        step(CONSTANT, [3, 1], model=Holder(block.double(), call), blocks=["block"])


@pytest.mark.parametrize("policy", [BLOCKS, CONSTANT], ids=["blocks", "constant"])
def test_a_deep_copy_runs_its_own_blocks(policy: Any) -> None:
    model = net()
    engine = shardkit.open_engine(
        "single", model, lambda n: torch.optim.SGD([p for _, p in n], lr=0.1), blocks=["?"], normalization=policy
    )
    twin = copy.deepcopy(engine.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.train()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    assert twin(x).abs().max() == 0 and engine.model(x).abs().max() > 0


def test_a_block_whose_forward_was_replaced_is_refused() -> None:
    model = net()
    model[1].forward = lambda x: x
    with pytest.raises(BackendError, match=r"normalization.*forward of block '1' was replaced already"):
        step(BLOCKS, [2, 2], model=model)


def test_a_host_batch_comes_back_whole_for_any_operation() -> None:
    a, b = torch.randn(2, 3), torch.randn(1, 3)
    batch = HostBatch([OnHost(a), OnHost(b)])
    assert batch.shape == (3, 3)
    assert torch.equal(batch + 1, torch.cat([a, b]) + 1) and type(batch + 1) is torch.Tensor
    assert isinstance(batch.detach(), HostBatch)
    assert torch.equal(torch.cat([batch, batch]), torch.cat([a, b, a, b]))
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        value = torch.arange(6).reshape(2, 3).to(dtype)
        assert torch.equal(OnHost(value).tensor(), value) and OnHost(value).tensor().dtype == dtype
    assert OnHost(torch.zeros(0, 4)).tensor().shape == (0, 4)
