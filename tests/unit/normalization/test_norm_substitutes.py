"""Norms that do not depend on the batch, in place of BatchNorm."""

from __future__ import annotations

import pytest
import torch
from norm_nets import ResNet, images
from torch import nn
from torch.nn import functional as F

from shardkit.normalization import apply_policy
from shardkit.normalization.substitute import num_groups
from shardkit.recipe.schema import Normalization
from shardkit.world import World


def put(model: nn.Module, policy: str, **more: int) -> nn.Module:
    applied = apply_policy(model, Normalization(policy=policy, **more), world=World())
    assert all("retraining" in row.why for row in applied.rows if row.old.startswith("BatchNorm"))
    return model


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 1), (16, 2), (31, 1), (64, 8), (72, 9), (256, 32), (2048, 32)],
)
def test_groups_divide_and_keep_8_channels_where_there_are(channels: int, groups: int) -> None:
    assert num_groups(channels, 32) == groups


def test_fewer_groups_on_request() -> None:
    assert num_groups(256, 1) == 1 and num_groups(256, 5) == 4 and num_groups(72, 8) == 8
    assert put(nn.Sequential(nn.BatchNorm2d(64)), "group", num_groups=4)[0].num_groups == 4


@pytest.mark.parametrize("policy", ["group", "layer", "instance"])
def test_weights_eps_and_zero_init_stay_and_no_item_sees_another(policy: str) -> None:
    torch.manual_seed(0)
    model = ResNet(16).double()
    model.bn_head = nn.Identity()
    model.bn1.eps = 0.5
    weights = [model.bn1.weight, model.layer1[0].bn2.weight]
    put(model, policy)
    assert model.bn1 is model.again and model.bn1.eps == 0.5 and not model.layer1[0].bn2.weight.any()
    assert model.bn1.weight is weights[0] and model.layer1[0].bn2.weight is weights[1]
    assert not any("running" in name for name in model.state_dict())
    x = images(4, 16)
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(x)[:1], model(x[:1]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", ["group", "layer"])
def test_batch_norm_1d_on_vectors_becomes_layer_norm(policy: str) -> None:
    norm = nn.BatchNorm1d(32).double()
    nn.init.normal_(norm.weight)
    put(norm, policy)
    x = torch.randn(5, 32, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (32,), norm.weight, norm.bias, norm.eps))
    y = torch.randn(5, 32, 7, dtype=torch.float64)
    groups = 4 if policy == "group" else 1
    torch.testing.assert_close(norm(y), F.group_norm(y, groups, norm.weight, norm.bias, norm.eps))


def test_instance_norm_on_vectors_is_refused() -> None:
    norm = put(nn.BatchNorm1d(4), "instance")
    assert norm(torch.randn(3, 4, 6)).shape == (3, 4, 6)
    with pytest.raises(ValueError, match="policy=layer"):
        norm(torch.randn(3, 4))


@pytest.mark.parametrize("policy", ["group", "layer", "instance"])
def test_state_can_be_saved_and_loaded(policy: str) -> None:
    model, other = (put(nn.Sequential(nn.BatchNorm2d(16)), policy) for _ in range(2))
    nn.init.normal_(model[0].weight)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].weight, model[0].weight) and repr(model)
