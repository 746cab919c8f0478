"""Our BatchNorm against torch's, in one process."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from norm_nets import images
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import WindowError
from shardkit.normalization import BatchNorm, Moments, Tape, commit, counting
from shardkit.normalization.normalize import Normalize
from shardkit.world import World

WORLD = World()


def pair(mode: str, **arguments: object) -> tuple[nn.BatchNorm2d, BatchNorm]:
    torch.manual_seed(1)
    theirs = nn.BatchNorm2d(3, **arguments).double()
    if theirs.affine:
        nn.init.normal_(theirs.weight)
    ours = BatchNorm(3, mode=mode, **arguments).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def close(a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float = 1e-12) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", ["local", "sync", "deferred", "exact"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"bias": False}, {"eps": 0.1}],
    ids=lambda arguments: "-".join(arguments) or "default",
)
def test_training_equals_torch(mode: str, arguments: dict[str, object]) -> None:
    theirs, ours = pair(mode, **arguments)
    for seed in range(3):
        x, y = (images(seed=seed).requires_grad_() for _ in range(2))
        weights = images(seed=9)
        a, b = theirs(x), ours(y)
        (a * weights).square().sum().backward()
        (b * weights).square().sum().backward()
        commit([ours], WORLD, keep=True)
        assert close(a, b) and close(x.grad, y.grad, 1e-11)
    assert all(close(p.grad, q.grad, 1e-11) for p, q in zip(theirs.parameters(), ours.parameters(), strict=True))
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert all(close(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_gradcheck_through_the_statistics() -> None:
    def normalize(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            moments = Moments.of(x)
        return Normalize.apply(x, weight, bias, moments, 1e-3, lambda sums: sums, True)

    x, weight, bias = images(3, 2), torch.randn(3).double(), torch.randn(3).double()
    assert torch.autograd.gradcheck(normalize, [t.requires_grad_() for t in (x, weight, bias)])


def test_a_second_derivative_is_refused() -> None:
    _, ours = pair("sync")
    x = images().requires_grad_()
    (first,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("over_ranks", [False, True])
def test_deferred_commits_the_pooled_statistics_once(over_ranks: bool) -> None:
    theirs, ours = pair("deferred")
    ours.set_mode("deferred", over_ranks=over_ranks)
    parts = images(12).split([5, 1, 4, 2])
    for part in parts:
        ours(part)
    assert close(ours.running_mean, torch.zeros(3).double())
    commit([ours], WORLD, keep=True)
    theirs(torch.cat(parts))
    assert all(close(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("mode", ["deferred", "exact"])
def test_a_step_left_out_leaves_the_running_statistics(mode: str) -> None:
    _, ours = pair(mode)
    before = copy.deepcopy(ours.state_dict())
    ours(images())
    commit([ours], WORLD, keep=False)
    commit([ours], WORLD, keep=True)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_an_exact_layer_called_twice_updates_twice_as_in_the_large_batch() -> None:
    theirs, ours = pair("exact")
    for x in (images(seed=1), images(seed=2) * 3):
        theirs(x), ours(x)
    commit([ours], WORLD, keep=True)
    assert all(close(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_frozen_stays_frozen_in_training() -> None:
    ours = BatchNorm(3, mode="frozen").double()
    model = nn.Sequential(ours).train()
    x = images()
    assert not ours.training and close(model(x), x / (1 + ours.eps) ** 0.5)
    assert int(ours.num_batches_tracked or 0) == 0


@pytest.mark.parametrize("mode", ["sync", "deferred", "exact"])
def test_one_value_a_channel_is_refused(mode: str) -> None:
    with pytest.raises(WindowError, match="one value a channel"):
        BatchNorm(3, mode=mode)(torch.randn(1, 3))


@pytest.mark.parametrize("mode", ["local", "sync", "deferred", "exact"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_empty_batch_gives_zero_gradients_and_moves_nothing(mode: str, momentum: float | None) -> None:
    ours = BatchNorm(3, mode=mode, momentum=momentum)
    ours.running_mean.fill_(7.0)
    x = torch.zeros(0, 3, 4, 4, requires_grad=True)
    ours(x).sum().backward()
    commit([ours], WORLD, keep=True)
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())
    assert ours.running_mean.tolist() == [7.0] * 3


@pytest.mark.parametrize("mode", ["local", "sync", "deferred", "exact"])
def test_a_filler_moves_nothing_and_stays_finite(mode: str) -> None:
    net = nn.Sequential(*[BatchNorm(3, mode=mode) for _ in range(30)])
    net[0].running_mean.fill_(7.0)
    x = (images() * 1e4).float().requires_grad_()
    with counting(False):
        loss = net(x).square().sum()
        (loss * 0.0).backward()
    commit(net, WORLD, keep=True)
    assert loss.isfinite() and x.grad is not None and not x.grad.any()
    assert net[0].running_mean.tolist() == [7.0] * 3 and int(net[0].num_batches_tracked) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["local", "sync", "deferred", "exact", "frozen"])
def test_low_precision_inputs_keep_fp32_statistics(dtype: torch.dtype, mode: str) -> None:
    layer = BatchNorm(4, mode=mode)
    conv = nn.Conv2d(3, 4, 3)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(conv(images().float()))
    y.float().square().sum().backward()
    assert y.dtype == dtype and layer.running_mean.dtype == torch.float32
    # As under a sharding backend that casts parameters to the compute type.
    low = BatchNorm(3, mode=mode)
    low.weight.data, low.bias.data = low.weight.data.to(dtype), low.bias.data.to(dtype)
    x = images().to(dtype).requires_grad_()
    low(x).float().square().sum().backward()
    commit([low], WORLD, keep=True)
    assert x.grad is not None and low.weight.grad is not None and low.running_mean.dtype == torch.float32
    if mode != "frozen":
        torch.testing.assert_close(low.running_mean, 0.1 * x.detach().float().mean((0, 2, 3)), rtol=1e-5, atol=1e-6)


def test_channels_last_stays_channels_last() -> None:
    theirs, ours = pair("sync")
    x = images().to(memory_format=torch.channels_last)
    y = ours(x.requires_grad_())
    y.square().sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last) and close(y, theirs(x))
    assert x.grad is not None and x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mode", ["sync", "deferred", "exact", "frozen"])
def test_evaluation_is_bit_equal(mode: str) -> None:
    theirs, ours = pair(mode)
    theirs(images())
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(theirs.eval()(images(seed=3)), ours.eval()(images(seed=3)))


def test_layers_can_be_copied_and_pickled() -> None:
    _, ours = pair("exact")
    ours(images())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.mode == "exact" and close(other(images()), ours(images()))


def test_moments_of_shifted_data_do_not_cancel() -> None:
    values = np.random.default_rng(0).normal(size=(64, 5, 7)) + 1e6
    x = torch.from_numpy(values).float()
    values = x.double().numpy()
    parts = [Moments.of(part) for part in x.split([1, 30, 0, 33])]
    merged = Moments.merge(torch.stack([part.packed() for part in parts]))
    for moments in (Moments.of(x), merged):
        np.testing.assert_allclose(moments.mean, values.mean((0, 2)), rtol=1e-7)
        np.testing.assert_allclose(moments.variance(), values.var((0, 2)), rtol=3e-3)
    naive = x.square().mean((0, 2)) - x.mean((0, 2)).square()
    assert (naive - torch.from_numpy(values.var((0, 2)))).abs().min() > 10


def test_moments_merge_exactly_in_float64() -> None:
    x = images(9) * 100 + 1e6
    merged = Moments.merge(torch.stack([Moments.of(part).packed() for part in x.split([2, 0, 3, 4])]))
    whole = Moments.of(x)
    assert merged.count == whole.count and close(merged.mean, whole.mean) and close(merged.m2, whole.m2, 1e-9)


class Block(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = BatchNorm(3, mode=mode)
        self.calls = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = self.norm(self.conv(x)).tanh()
        return x


def recorded(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tape = Tape()
    return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (tape.recording(), tape.replaying()))


@pytest.mark.parametrize("mode", ["sync", "deferred", "exact"])
def test_a_recomputed_block_has_the_same_gradients_and_counts_once(mode: str) -> None:
    torch.manual_seed(0)
    block = Block(mode).double()
    block.calls = 2
    plain = copy.deepcopy(block)
    x, y = (images().requires_grad_() for _ in range(2))
    plain(x).square().sum().backward()
    out = recorded(block, y).square().sum()
    # Twice: the block is recomputed for each.
    out.backward(retain_graph=True)
    out.backward()
    commit([block.norm, plain.norm], WORLD, keep=True)
    for p, q in zip((x, *plain.parameters()), (y, *block.parameters()), strict=True):
        assert close(2 * p.grad, q.grad)
    assert all(torch.equal(v, block.state_dict()[name]) for name, v in plain.state_dict().items())


def test_a_recomputed_block_inside_another_counts_once() -> None:
    torch.manual_seed(0)
    block = Block("sync").double()
    plain = copy.deepcopy(block)
    x, y = (images().requires_grad_() for _ in range(2))

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return recorded(block, x * 2)

    plain(x * 2).square().sum().backward()
    recorded(Outer(), y).square().sum().backward()
    assert close(x.grad, y.grad)
    assert all(torch.equal(v, block.state_dict()[name]) for name, v in plain.state_dict().items())


def test_a_recomputation_that_takes_another_way_is_refused() -> None:
    block = Block("exact").double()
    out = recorded(block, images().requires_grad_()).sum()
    block.norm = BatchNorm(3, mode="exact").double()
    with pytest.raises(WindowError, match=r"exact\.blocks"):
        out.backward()
