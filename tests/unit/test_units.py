from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit.engines.units import find_units
from shardkit.errors import BackendError


def names(model: nn.Module, blocks: list[str]) -> list[str]:
    return [name for name, _ in find_units(model, blocks)]


class Lucid(nn.Module):
    """A ModuleList of ModuleLists, as many vision transformers are written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2)])


def test_a_container_that_is_never_called_stands_for_what_it_holds() -> None:
    found = ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert names(Lucid(), []) == names(Lucid(), ["layers.?"]) == found


def test_units_found_by_themselves_leave_tied_parameters_to_the_root() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), nn.Linear(3, 3))
    model[0][1].weight = model[1].weight
    assert names(model, []) == ["0.0", "0.2"]
    with pytest.raises(BackendError, match=r"'0.1' shares the parameter '0.1.weight'"):
        find_units(model, ["0.*"])


def test_only_the_outermost_match_of_a_chain_is_a_unit() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])})
    assert names(model, ["blocks.*"]) == ["blocks.0", "blocks.1"]
    assert names(model, ["Sequential"]) == ["blocks.0", "blocks.1"]


def test_a_model_without_a_stack_has_no_units() -> None:
    assert names(nn.Linear(2, 2), []) == []
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []) == []


def test_a_glob_that_matches_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(BackendError, match=r"'layerz.\*' matches no module.*layers.*Linear"):
        find_units(Lucid(), ["layerz.*"])
    with pytest.raises(BackendError, match="ReLU"):
        find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["ReLU"])
    assert torch.is_grad_enabled()
