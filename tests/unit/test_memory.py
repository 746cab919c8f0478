"""PeakBytes against cases whose peak is known by counting on paper."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.memory import PeakBytes
from shardkit.normalization.host import on_host

N = 256
SIZE = N * N * 4
# Bytes of one square matrix.


def test_a_tensor_counts_while_it_lives() -> None:
    with PeakBytes() as used:
        a = torch.zeros(N, N)
        assert (used.current, used.peak) == (SIZE, SIZE)
        b = a + 1
        assert (used.current, used.peak) == (2 * SIZE, 2 * SIZE)
        del a
        assert (used.current, used.peak) == (SIZE, 2 * SIZE)
        b = b + 1
        assert (used.current, used.peak) == (SIZE, 2 * SIZE)
    del b
    gc.collect()
    assert (used.current, used.peak) == (SIZE, 2 * SIZE)


def test_what_was_there_before_does_not_count() -> None:
    a = torch.zeros(N, N)
    with PeakBytes() as used:
        a.add_(1)
        a.view(-1)[:5] = 2
        torch.sum(a, dim=0, out=a[0])
        del a
    assert used.peak <= N * 4


def test_views_and_in_place_operators_add_nothing() -> None:
    with PeakBytes() as used:
        a = torch.zeros(N, N)
        parts = [a.t(), a.view(-1), a[0], a.unsqueeze(0).expand(4, -1, -1), a.detach(), *a.chunk(4)]
        a.mul_(2).relu_()
        del a
        assert used.current == SIZE
        del parts
        assert used.current == 0
    assert used.peak == SIZE


def test_a_storage_that_grows_counts_what_it_grew_by() -> None:
    with PeakBytes() as used:
        a = torch.zeros(N, N)
        a.resize_(3 * N, N)
        assert used.current == 3 * SIZE


def chain(depth: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(N, N)
    return x, [torch.randn(N, N, requires_grad=True) for _ in range(depth)]


def test_a_chain_of_products_keeps_every_input_for_its_backward() -> None:
    depth = 8
    x, weights = chain(depth)
    with PeakBytes() as used:
        y = x
        for weight in weights:
            y = (y @ weight).relu()
        # relu keeps its result, which is the next product's input.
        assert used.current == depth * SIZE
        assert used.peak == (depth + 1) * SIZE
        loss = y.sum()
        del y
        loss.backward()
        del loss
        assert used.current == depth * SIZE  # the gradients of the weights
    # The first steps of the backward hold all activations, one weight gradient at most and a few on the way.
    assert (depth + 1) * SIZE <= used.peak <= (depth + 4) * SIZE


def test_checkpointing_lowers_the_peak_to_what_it_keeps() -> None:
    depth, pieces = 16, 4
    x, weights = chain(depth)

    def run(start: int, y: torch.Tensor) -> torch.Tensor:
        for weight in weights[start : start + depth // pieces]:
            y = (y @ weight).sigmoid()
        return y

    def peak(checkpointed: bool) -> int:
        for weight in weights:
            weight.grad = torch.zeros_like(weight)  # so that gradients add nothing
        with PeakBytes() as used:
            y = x
            for start in range(0, depth, depth // pieces):
                y = checkpoint(run, start, y, use_reentrant=False) if checkpointed else run(start, y)
            assert isinstance(y, torch.Tensor)
            y.sum().backward()
        return used.peak

    whole, pieced = peak(False), peak(True)
    assert whole >= depth * SIZE
    # The inputs of the pieces, the inside of one, and a few on the way.
    assert pieced <= (pieces + depth // pieces + 4) * SIZE
    assert pieced < 0.7 * whole


def test_a_backward_is_counted_with_the_optimizer() -> None:
    model = nn.Linear(N, N, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with PeakBytes() as used:
        model(torch.zeros(1, N)).sum().backward()
        assert used.current >= SIZE  # the gradient
        optimizer.step()
        assert 2 * SIZE <= used.current <= 2.1 * SIZE  # and the momentum
        optimizer.zero_grad()
        assert used.current <= 1.1 * SIZE


def test_what_numpy_holds_is_the_host_and_does_not_count() -> None:
    depth = 8
    x, weights = chain(depth)

    def kept(host: bool) -> int:
        with PeakBytes() as used:
            y = x
            with on_host(host):
                for weight in weights:
                    y = (y @ weight).sigmoid()
            kept = used.current
            y.sum().backward()
        return kept

    assert kept(False) == depth * SIZE
    assert kept(True) == SIZE


def test_a_block_can_be_nested_and_entered_again() -> None:
    outer, inner = PeakBytes(), PeakBytes("cpu")
    with outer:
        a = torch.zeros(N, N)
        with inner:
            b = a + 1
            del b
        assert inner.peak == SIZE
        with inner:
            pass
        assert inner.peak == 0
    assert outer.peak == 2 * SIZE


def test_an_error_inside_leaves_nothing_switched_on() -> None:
    used = PeakBytes()
    with pytest.raises(ValueError, match="inside"):
        with used:
            raise ValueError("inside")
    torch.zeros(N, N)
    assert used.peak == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_counts_from_where_the_block_begins() -> None:
    before = torch.zeros(N, N, device="cuda")
    with PeakBytes("cuda") as used:
        a = before + 1
        b = a + 1
        del a
    assert used.peak == 2 * SIZE and used.current == SIZE
    del b
