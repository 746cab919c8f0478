"""What `shardkit doctor` measures, against the same by hand, and what it recommends."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from shardkit.doctor.delta import LayerDelta
from shardkit.doctor.diagnosis import diagnose
from shardkit.doctor.flatness import Flatness
from shardkit.doctor.passes import cycle, large_batch
from shardkit.doctor.plot import plot
from shardkit.doctor.report import as_text
from shardkit.doctor.subject import Subject, open_copy
from shardkit.losses import adapt
from shardkit.recipe.schema import Exact, Normalization, NormalizationRule

SIZE = 4
# Pixels a side.


def squares(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


def net(**norm: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6, **norm), nn.ReLU(), nn.Dropout(0.5)]
    model = nn.Sequential(*layers, nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4, **norm)).double()
    with torch.no_grad():  # statistics that are not those of a new layer
        for _ in range(3):
            model(torch.randn(8, 3, SIZE, SIZE, dtype=torch.float64) + 1)
    return model


def batches(ranks: int, steps: int, items: int) -> list[list[torch.Tensor]]:
    """Each item with a brightness of its own, so that small batches differ."""
    generator = torch.Generator().manual_seed(1)
    shape = (ranks, steps, items, 3, SIZE, SIZE)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    images += torch.randn((*shape[:3], 1, 1, 1), generator=generator, dtype=torch.float64)
    return [list(rank) for rank in images]


def subject(
    policy: Any = "keep", *, ranks: int = 1, steps: int = 4, items: int = 3, model: nn.Module | None = None, **more: Any
) -> Subject:
    return Subject(
        model=model if model is not None else net(),
        loss=adapt(squares),
        ranks=batches(ranks, steps, items),
        normalization=policy if isinstance(policy, Normalization) else Normalization(policy=policy),
        micro_batch_size=items,
        device=torch.device("cpu"),
        **more,
    )


def observed(given: Subject, which: Any) -> Any:
    return which(given, open_copy(given, given.normalization, given.accumulation))


def by_hand(model: nn.Module, forwards: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The running statistics after forwards of a plain copy without dropout."""
    model = copy.deepcopy(model).train()
    model[3].eval()
    with torch.no_grad():
        for batch in forwards:
            model(batch)
    return {name: (model[int(name)].running_mean, model[int(name)].running_var) for name in ("1", "5")}


@pytest.mark.parametrize("norm", [{}, {"momentum": 0.3}, {"momentum": None}], ids=str)
def test_statistics_become_what_torch_makes_of_them(norm: dict[str, Any]) -> None:
    given = subject(model=net(**norm))
    for which, forwards in ((cycle, given.ranks[0]), (large_batch, [torch.cat(given.ranks[0])])):
        want = by_hand(given.model, forwards)
        for name, seen in observed(given, which).items():
            for got, expected in zip(seen.become, want[name], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
            assert seen.updates == len(forwards)


def test_statistics_settle_where_the_same_cycle_again_and_again_leads() -> None:
    given = subject()
    want = by_hand(given.model, given.ranks[0] * 100)
    for name, seen in observed(given, cycle).items():
        for got, expected in zip(seen.settled, want[name], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_ranks_that_keep_their_own_are_merged_as_before_an_evaluation() -> None:
    given = subject(ranks=3, steps=2)
    ranks = [by_hand(given.model, forwards) for forwards in given.ranks]
    for name, seen in observed(given, cycle).items():
        means, variances = (torch.stack([rank[name][index] for rank in ranks]) for index in (0, 1))
        torch.testing.assert_close(seen.become[0], means.mean(0))
        torch.testing.assert_close(seen.become[1], variances.mean(0) + (means - means.mean(0)).square().mean(0))


def test_sync_sees_the_items_of_a_step_and_deferred_moves_once() -> None:
    steps = [torch.cat(pair) for pair in zip(*batches(2, 4, 3), strict=True)]
    given = subject("sync", ranks=2)
    want = by_hand(given.model, steps)
    for name, seen in observed(given, cycle).items():
        torch.testing.assert_close(seen.become[1], want[name][1])
        assert seen.updates == 4
    given = subject("deferred", ranks=2)
    want = by_hand(given.model, [torch.cat(steps)])
    seen = observed(given, cycle)
    assert seen["1"].updates == seen["5"].updates == 1
    torch.testing.assert_close(seen["1"].become[1], want["1"][1])  # the first layer's input is the same
    assert not torch.allclose(seen["5"].become[1], want["5"][1], rtol=1e-4)


def test_small_micro_batches_drift_and_exact_is_recommended() -> None:
    found = diagnose(subject(steps=8, items=2))
    assert [delta.name for delta in found.layers] and {delta.verdict for delta in found.layers} <= {"drifts", "badly"}
    severities = [delta.severity for delta in found.layers]
    assert severities == sorted(severities, reverse=True)
    assert all(delta.output_delta > 0.1 for delta in found.layers)
    assert found.recommended.policy == "exact" and found.recommended.remaining is not None
    assert found.recommended.remaining < 1e-6
    assert found.layers[0].name in found.verdict and "momentum 0.1 works as 0.57" in found.verdict
    assert found.recommended.why.count(". ") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_exact_does_not_drift(ranks: int) -> None:
    found = diagnose(subject("exact", ranks=ranks))
    assert all(delta.severity == 0.0 and delta.output_delta == 0.0 for delta in found.layers)
    assert len(found.layers) == 2 and found.verdict.startswith("No layer drifts")
    assert found.recommended.policy == "exact" and "nothing to change" in found.recommended.why


def test_recommendations_follow_the_table() -> None:
    def policy(given: Any = "keep", **shape: int) -> str:
        return diagnose(subject(given, **shape)).recommended.policy

    assert policy(ranks=1, steps=1, items=16) == "keep"
    assert policy(ranks=2, steps=1, items=16) == "sync"
    assert policy(ranks=1, steps=4, items=2) == "exact"
    assert policy("sync", ranks=2, steps=2, items=2) == "exact"
    assert policy(Normalization(pretrained=True), ranks=1, steps=2, items=2) == "frozen"


def test_deferred_is_recommended_where_a_micro_batch_is_enough() -> None:
    given = subject("auto", ranks=2, steps=2, items=32)
    found = diagnose(given)
    assert found.policy == "deferred"  # what auto chooses for the two ranks of the recipe
    assert found.recommended.policy == "deferred"


def test_a_block_to_paste_keeps_the_rules_and_drops_what_has_no_meaning() -> None:
    rules = [NormalizationRule(match="1", policy="frozen")]
    section = Normalization(policy="deferred", over_ranks=True, rules=rules, pretrained=False)
    found = diagnose(subject(section, steps=8, items=2))
    assert [delta.name for delta in found.layers] == ["5"]  # a frozen layer does not depend on the batch
    assert yaml.safe_load(found.recommended.block) == {
        "normalization": {"policy": "exact", "rules": [{"match": "1", "policy": "frozen"}]}
    }


def test_exact_keeps_its_settings_and_may_be_told_how_to_take_less() -> None:
    section = Normalization(policy="exact", exact=Exact(offload=True))
    found = diagnose(subject(section, items=8))
    assert yaml.safe_load(found.recommended.block) == {"normalization": {"policy": "exact", "exact": {"offload": True}}}
    assert "offload" not in found.verdict
    assert "normalization.exact.offload=true" in diagnose(subject("exact", items=8)).verdict


def test_nothing_to_do_without_batch_norm() -> None:
    found = diagnose(subject(model=nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 2)).double()))
    assert found.layers == () and "No BatchNorm in this model" in found.verdict
    assert found.recommended.policy == "keep" and "nothing to do" in found.recommended.why
    found = diagnose(subject("group"))
    assert found.layers == () and "Policy group leaves no BatchNorm" in found.verdict
    assert found.recommended.policy == "group"


def test_a_micro_batch_without_a_variance_is_a_finding() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 5), nn.BatchNorm1d(5)).double()
    found = diagnose(subject(model=flat, items=1))
    assert found.failure and found.failure in found.verdict
    assert found.recommended.policy == "exact"
    keep, exact = found.memory
    assert keep.verdict == "fails" and not keep.peak_bytes and keep.failure
    assert list(exact.peak_bytes) == [2, 4, 8] and "one value a channel" in (exact.failure or "")


def test_any_other_error_is_the_models_own() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < 4:
                raise ValueError("not enough of it")
            return self.norm(x)

    with pytest.raises(ValueError, match="not enough of it"):
        diagnose(subject(model=Picky()))


def test_the_subject_stays_as_it_is() -> None:
    model = net().eval()
    given = subject(model=model, ranks=2)
    before = copy.deepcopy(model.state_dict())
    images = copy.deepcopy(given.ranks)
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    streams = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    diagnose(given)
    assert torch.equal(streams[0], torch.get_rng_state()) and streams[2] == random.getstate()
    assert np.array_equal(streams[1], np.random.get_state()[1])
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert type(model[1]) is nn.BatchNorm2d and not model.training and not model[3].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(a, b) for x, y in zip(images, given.ranks, strict=True) for a, b in zip(x, y, strict=True))


def test_memory_stays_flat_under_accumulation_and_grows_under_exact() -> None:
    found = diagnose(subject(items=32))
    keep, exact = found.memory
    assert (keep.policy, keep.verdict, exact.policy) == ("keep", "flat", "exact")
    assert keep.peak_bytes and exact.peak_bytes and list(keep.peak_bytes) == [1, 2, 4, 8]
    assert exact.peak_bytes[8] > 3 * keep.peak_bytes[8] and exact.verdict == "grows"


def test_verdicts_follow_the_stated_thresholds() -> None:
    def verdict(mean: float, variance: float, settled: float = 0.0) -> str:
        return LayerDelta(
            name="a",
            mode="local",
            channels=1,
            momentum=0.1,
            values=8,
            updates=2,
            mean_delta=mean,
            variance_delta=variance,
            settled_mean_delta=settled,
            settled_variance_delta=0.0,
            worst_mean_delta=mean,
            worst_variance_delta=variance,
            output_delta=9.0,
        ).verdict

    assert [verdict(0.05, 0.1), verdict(0.06, 0.1), verdict(0.05, 0.11), verdict(0.0, 0.0, 0.06)] == [
        "ok",
        *["drifts"] * 3,
    ]
    assert [verdict(0.26, 0.0), verdict(0.0, 0.51), verdict(math.nan, 0.0)] == ["badly"] * 3
    assert Flatness(policy="keep", peak_bytes={1: 50, 2: 100, 4: 100, 8: 110}).verdict == "flat"
    assert Flatness(policy="keep", peak_bytes={1: 50, 2: 100, 4: 105, 8: 111}).verdict == "grows"


def test_the_report_the_json_and_the_picture_hold_the_same(tmp_path: Any) -> None:
    found = diagnose(subject(steps=8, items=2))
    text = as_text(found)
    assert text.isascii() and all(len(line) <= 120 for line in text.splitlines())
    assert found.layers[0].name in text and "  policy: exact" in text and "badly" in text
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [layer["verdict"] for layer in read["layers"]] == [delta.verdict for delta in found.layers]
    assert read["memory"][0]["peak_bytes"].keys() == {"1", "2", "4", "8"} and read["recommended"]["policy"] == "exact"
    pytest.importorskip("matplotlib")
    plot(found, tmp_path / "doctor.png")
    assert (tmp_path / "doctor.png").read_bytes().startswith(b"\x89PNG")
