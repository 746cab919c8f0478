"""The data sets of the recipes."""

from __future__ import annotations

import sys

import pytest
import torch

from shardkit.data.digits import Digits
from shardkit.data.topics import Topics
from shardkit.errors import RequestError


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return Digits("train"), Digits("eval")


def test_digits_are_1437_and_360_different_images(digits):
    train, evaluation = digits
    assert (len(train), len(evaluation)) == (1437, 360)
    whole = torch.cat([train.images, evaluation.images]).flatten(1)
    assert len(whole.unique(dim=0)) == 1797
    assert torch.equal(Digits("eval").images, evaluation.images)


def test_digit_items_are_normalised_images_and_class_numbers(digits):
    image, label = digits[0][0]
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((1, 8, 8), torch.float32, (), torch.int64)
    assert digits[0].images.mean().item() == pytest.approx(0.0, abs=0.01)
    assert digits[0].images.std().item() == pytest.approx(1.0, abs=0.01)
    assert set(digits[1].labels.tolist()) == set(range(10))


def test_digits_can_be_resized_and_shifted(digits):
    assert Digits("eval", size=16)[0][0].shape == (1, 16, 16)
    shifted = Digits("eval", augment=True)
    torch.manual_seed(0)
    seen = torch.stack([shifted[3][0] for _ in range(100)])
    assert seen.shape == (100, 1, 8, 8)
    assert len(seen.flatten(1).unique(dim=0)) == 9
    assert any(torch.equal(image, digits[1][3][0]) for image in seen)


def test_digits_name_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RequestError, match=r"pip install 'shardkit\[examples\]'"):
        Digits("train")


@pytest.mark.parametrize("make", [Digits, Topics])
def test_an_unknown_split_is_refused(make):
    with pytest.raises(RequestError, match="no split 'test'; expected train or eval"):
        make("test")


def test_topics_items_are_bytes_and_the_bytes_after_them():
    data = Topics("train", context=10)
    tokens, following = data[0]
    assert bytes(tokens.tolist()) == b'The "asser'
    assert bytes(following.tolist()) == b'he "assert'
    assert tokens.dtype == following.dtype == torch.int64
    assert data[1][0][0] == following[-1]


def test_topics_keep_the_last_tenth_for_evaluation_and_give_only_whole_items():
    train, evaluation = Topics("train", context=64), Topics("eval", context=64)
    assert len(train) / len(evaluation) == pytest.approx(9, rel=0.01)
    for data in (train, evaluation):
        assert data[len(data) - 1][1].shape == (64,)
        with pytest.raises(IndexError):
            data[len(data)]


@pytest.mark.parametrize("context", [0, 10**9])
def test_topics_refuse_a_context_without_an_item(context):
    with pytest.raises(RequestError, match="is not possible; expected 1 to"):
        Topics("train", context=context)
