"""The models of the recipes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit.errors import RequestError
from shardkit.models.gpt import GPT
from shardkit.models.resnet import ResNet


@pytest.mark.parametrize("depth", [8, 20])
def test_resnet_has_as_many_weighted_layers_as_its_depth(depth):
    model = ResNet(depth=depth, in_channels=1, num_classes=7, width=4)
    in_shortcuts = [module for name, module in model.named_modules() if "shortcut" in name]
    layers = [
        module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear) and module not in in_shortcuts
    ]
    assert len(layers) == depth
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 7)


def test_new_resnet_blocks_pass_their_shortcut_on():
    block = ResNet(depth=8, width=4).stages[0][0]
    features = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(features), features)


@pytest.mark.parametrize(("depth", "near"), [(21, "20 and 26"), (2, "8 and 14"), (0, "8 and 14"), (-8, "8 and 14")])
def test_resnet_refuses_depths_that_do_not_exist(depth, near):
    with pytest.raises(RequestError, match=f"{depth} is not 6n .*{near}"):
        ResNet(depth=depth)


def test_gpt_logits_depend_on_earlier_tokens_only():
    torch.manual_seed(0)
    model = GPT(vocab_size=11, context=8, width=16, heads=2, layers=2).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 11)
    assert torch.allclose(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert torch.allclose(model(tokens[:, :3]), before[:, :3], atol=1e-6)


def test_gpt_ties_its_head_to_its_embedding_unless_told_not_to():
    tied = GPT(width=16, heads=2, layers=1)
    assert tied.head.weight is tied.embedding.weight
    untied = GPT(width=16, heads=2, layers=1, tie=False)
    assert untied.head.weight is not untied.embedding.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_gpt_weights_have_standard_deviation_002_and_biases_are_zero():
    torch.manual_seed(0)
    model = GPT(width=64, heads=2, layers=2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" not in name:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


def test_gpt_drops_out_in_training_only():
    model = GPT(width=16, heads=2, layers=1, dropout=0.5)
    tokens = torch.randint(256, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_refuses_heads_that_do_not_divide_its_width():
    with pytest.raises(RequestError, match="10 is not a multiple of 4 heads"):
        GPT(width=10, heads=4)
