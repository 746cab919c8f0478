"""The recipe's normalization section."""

from __future__ import annotations

import pytest

from shardkit.recipe.schema import Exact, Normalization, NormalizationRule


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (Normalization(num_groups=0, policy="group"), "num_groups"),
        (Normalization(over_ranks=True, policy="sync"), "over_ranks"),
        (Normalization(policy="sync", exact=Exact(blocks=["stages.*"])), "exact"),
        (Exact(blocks=[""]), "blocks"),
        (Exact(memory="constant", offload=False), "offload"),
        (NormalizationRule(match="", policy="keep"), "match"),
    ],
)
def test_what_does_not_fit_together_is_named(section: Normalization, key: str) -> None:
    assert [name for name, _ in section.check()] == [key]


@pytest.mark.parametrize(
    "section",
    [
        Normalization(),
        Normalization(policy="deferred", over_ranks=True),
        Normalization(rules=[NormalizationRule(match="*", policy="exact")], exact=Exact(offload=True)),
        Normalization(policy="auto", over_ranks=True, pretrained=True, exact=Exact(memory="constant")),
    ],
)
def test_what_fits_has_no_complaint(section: Normalization) -> None:
    assert list(section.check()) == []
