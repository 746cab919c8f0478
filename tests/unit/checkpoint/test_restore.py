"""What is loaded of a checkpoint, what is refused, and that a refusal changes nothing; in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.errors import CheckpointError

Make = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def net(seed: int = 0, width: int = 6, **more: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)) if not more else nn.ModuleDict(more)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def by_kind(lr: float = 0.01, decay: float = 0.1, *, swapped: bool = False) -> Make:
    """Two groups: biases without decay, and the rest."""

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for n, p in named if "bias" not in n], "lr": lr, "weight_decay": decay},
            {"params": [p for n, p in named if "bias" in n], "lr": 2 * lr, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups[::-1] if swapped else groups)

    return make


def open_single(model: nn.Module, make: Make = adamw, **more: Any) -> Any:
    return shardkit.open_engine("single", model, make, **more)


def step(engine: Any, times: int = 1, dtype: torch.dtype = torch.float32) -> None:
    for i in range(times):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
        shardkit.train_step(engine, [(x, x[:, :2])], nn.MSELoss())


def tensors(engine: Any) -> dict[tuple[str, str, str | None], torch.Tensor]:
    return {(i.kind, i.name, i.state): i.tensor.clone() for i in engine.state()}


def saved(engine: Any, folder: Path, **training: Any) -> str:
    return shardkit.save_checkpoint(engine, folder, step=2, training=training)


def refused(engine: Any, path: str, **more: Any) -> str:
    """The message of a refusal, after which nothing live is other than before."""
    before, groups = tensors(engine), [dict(g, params=None) for g in engine.optimizer.param_groups]
    with pytest.raises(CheckpointError) as caught:
        shardkit.load_checkpoint(engine, path, **more)
    after = tensors(engine)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert groups == [dict(g, params=None) for g in engine.optimizer.param_groups]
    return str(caught.value)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Any, str]:
    """A trained engine and its checkpoint."""
    engine = open_single(net())
    step(engine, 2)
    return engine, saved(engine, tmp_path, epoch=3)


def test_what_was_saved_is_what_is_loaded(trained: tuple[Any, str]) -> None:
    engine, path = trained
    other = open_single(net(seed=1))
    loaded = shardkit.load_checkpoint(other, path)
    assert loaded.step == 2 and loaded.training == {"epoch": 3} and loaded.notes == ()
    a, b = tensors(engine), tensors(other)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert other.scalars()["0.weight"]["step"] == 2


def test_a_folder_of_checkpoints_gives_the_newest_that_verifies(tmp_path: Path) -> None:
    engine = open_single(net())
    for number in (9, 10):
        shardkit.save_checkpoint(engine, tmp_path, step=number)
    assert shardkit.load_checkpoint(engine, tmp_path).step == 10
    shard = tmp_path / "step-00000010" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    loaded = shardkit.load_checkpoint(engine, tmp_path)
    assert loaded.step == 9 and "shard-00000-of-00001.safetensors is damaged" in loaded.notes[0]
    assert "damaged" in refused(engine, str(tmp_path / "step-00000010"))


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    assert "there is no checkpoint" in refused(open_single(net()), str(tmp_path / "stpe-1"))


def test_names_shapes_and_dtypes_that_do_not_fit_are_listed(trained: tuple[Any, str]) -> None:
    _, path = trained
    message = refused(open_single(net(width=7)), path)
    assert "0.weight has the shape (7, 4) here and (6, 4) in the checkpoint" in message
    assert "1.weight has the shape (2, 7) here" in message
    longer = nn.Sequential(*net(), nn.Linear(2, 2))
    assert "not in the checkpoint: 2.weight, 2.bias" in refused(open_single(longer), path)
    shorter = nn.Sequential(net()[0])  # type: ignore[index]
    message = refused(open_single(shorter), path)
    assert "in the checkpoint and not in the model: 1.weight, 1.bias" in message and "load.strict=false" in message
    half = open_single(net(), precision="bf16-true")
    message = refused(half, path)
    assert "is torch.bfloat16 here and torch.float32 in the checkpoint (load.cast=true converts it)" in message
    shardkit.load_checkpoint(half, path, cast=True)


def test_weights_and_moments_are_cast_together(trained: tuple[Any, str], tmp_path: Path) -> None:
    _, path = trained
    half = open_single(net(seed=1), precision="bf16-true")
    shardkit.load_checkpoint(half, path, cast=True)
    assert tensors(half)["optimizer", "0.weight", "exp_avg"].dtype == torch.bfloat16
    step(half, dtype=torch.bfloat16)
    back = open_single(net(seed=2))
    shardkit.load_checkpoint(back, saved(half, tmp_path / "half"), cast=True)
    assert tensors(back)["optimizer", "0.weight", "exp_avg"].dtype == torch.float32
    step(back)


def test_globs_that_match_nothing_are_refused(trained: tuple[Any, str]) -> None:
    _, path = trained
    for choice in ({"include": ["nosuch*"]}, {"exclude": ["0.wieght"]}):
        message = refused(open_single(net()), path, strict=False, **choice)
        assert "matches no name of the model or the checkpoint; there are 0.bias, 0.weight" in message
    assert "nothing of the checkpoint would be loaded" in refused(open_single(net()), path, exclude=["*"])


def test_a_learning_rate_that_the_recipe_changed_is_told(trained: tuple[Any, str]) -> None:
    _, path = trained
    other = open_single(net(), lambda named: torch.optim.AdamW([p for _, p in named], lr=0.5))
    (note,) = shardkit.load_checkpoint(other, path).notes
    assert "lr is 0.01 in the checkpoint and goes on, the recipe's 0.5 does not hold" in note


def test_what_a_schedule_moves_is_no_change_of_the_recipe(tmp_path: Path) -> None:
    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

    engine, other = open_single(net(), sgd), open_single(net(), sgd)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(e.optimizer, 0.5, total_steps=9) for e in (engine, other)]
    step(engine)
    schedulers[0].step()
    assert shardkit.load_checkpoint(other, saved(engine, tmp_path)).notes == ()


def test_not_strict_tells_what_was_left_out(trained: tuple[Any, str]) -> None:
    engine, path = trained
    longer = open_single(nn.Sequential(*net(seed=1), nn.Linear(2, 2)))
    loaded = shardkit.load_checkpoint(longer, path, strict=False)
    assert any("not in the checkpoint: 2.weight, 2.bias" in note for note in loaded.notes)
    assert torch.equal(tensors(longer)["parameter", "0.weight", None], tensors(engine)["parameter", "0.weight", None])
    assert "2.weight" not in longer.scalars()
    step(longer)


def test_include_and_exclude_choose_by_name(trained: tuple[Any, str]) -> None:
    engine, path = trained
    other = open_single(net(seed=1))
    fresh = tensors(other)
    loaded = shardkit.load_checkpoint(other, path, strict=False, include=["*.weight"], exclude=["1.*"])
    assert "not loaded, as load.include and load.exclude say: 0.bias, 1.weight, 1.bias" in loaded.notes[0]
    now, was = tensors(other), tensors(engine)
    assert torch.equal(now["parameter", "0.weight", None], was["parameter", "0.weight", None])
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(now["parameter", name, None], fresh["parameter", name, None])
        assert ("optimizer", name, "exp_avg") not in now
    assert torch.equal(now["optimizer", "0.weight", "exp_avg"], was["optimizer", "0.weight", "exp_avg"])


def test_options_follow_names_when_groups_change_their_order(tmp_path: Path) -> None:
    engine = open_single(net(), by_kind())
    step(engine)
    path = saved(engine, tmp_path)
    other = open_single(net(), by_kind(swapped=True))
    assert shardkit.load_checkpoint(other, path).notes == ()
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.0, 0.1]
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.02, 0.01]


def test_groups_that_cannot_have_their_options_are_refused(tmp_path: Path) -> None:
    two, one = open_single(net(), by_kind()), open_single(net())
    step(two), step(one)  # type: ignore[func-returns-value]
    from_two, from_one = saved(two, tmp_path / "two"), saved(one, tmp_path / "one")
    message = refused(open_single(net()), from_two)
    assert "0.weight and 0.bias are in one parameter group here and had different options" in message
    assert "weight_decay 0.1 and 0" in message and "load.groups=recipe" in message
    message = refused(open_single(net(), by_kind()), from_one)
    assert "were in one parameter group in the checkpoint and have different options here" in message
    other = open_single(net(), by_kind())
    shardkit.load_checkpoint(other, from_one, groups="recipe")
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.1, 0.0]
    assert torch.equal(tensors(other)["optimizer", "0.bias", "exp_avg"], tensors(one)["optimizer", "0.bias", "exp_avg"])


def test_groups_with_equal_options_may_be_joined_and_split(tmp_path: Path) -> None:
    def equal(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p]} for _, p in named], lr=0.01)

    many, one = open_single(net(), equal), open_single(net())
    step(many), step(one)  # type: ignore[func-returns-value]
    shardkit.load_checkpoint(open_single(net()), saved(many, tmp_path / "many"))
    shardkit.load_checkpoint(open_single(net(), equal), saved(one, tmp_path / "one"))


def test_options_that_the_recipe_changed_are_told(trained: tuple[Any, str]) -> None:
    _, path = trained
    other = open_single(net(), lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.5))
    notes = shardkit.load_checkpoint(other, path).notes
    assert any("weight_decay is 0.01 in the checkpoint and goes on, the recipe's 0.5 does not hold" in n for n in notes)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.01


def test_another_optimizer_is_refused(trained: tuple[Any, str]) -> None:
    _, path = trained
    sgd = open_single(net(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    message = refused(sgd, path)
    assert "the checkpoint's optimizer is torch.optim.adamw.AdamW, and this run's torch.optim.sgd.SGD" in message


def test_options_that_decide_what_state_there_is_cannot_change(trained: tuple[Any, str]) -> None:
    _, path = trained
    other = open_single(net(), lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, amsgrad=True))
    assert "amsgrad is True here and False in the checkpoint" in refused(other, path, groups="recipe")
    (note,) = [note for note in shardkit.load_checkpoint(other, path).notes if "amsgrad is False" in note]
    assert note.endswith("(it decides what state there is)")
    step(other)


def frozen_net(seed: int = 0) -> nn.Module:
    model = net(seed)
    model[0].requires_grad_(False)  # type: ignore[index, operator]
    return model


def test_frozen_parameters_are_kept_and_unfreezing_is_refused(tmp_path: Path) -> None:
    frozen = open_single(frozen_net())
    step(frozen)
    path = saved(frozen, tmp_path)
    again = open_single(frozen_net(seed=1))
    shardkit.load_checkpoint(again, path)
    assert torch.equal(tensors(again)["parameter", "0.weight", None], tensors(frozen)["parameter", "0.weight", None])
    thawed = open_single(net(seed=1))
    message = refused(thawed, path)
    assert "which has no optimizer state for them: 0.weight, 0.bias" in message
    shardkit.load_checkpoint(thawed, path, strict=False)
    assert set(thawed.scalars()) == {"1.weight", "1.bias"}
    step(thawed)
    message = refused(open_single(frozen_net()), saved(thawed, tmp_path / "thawed"))
    assert "trained in the checkpoint and not here: 0.weight, 0.bias" in message


class Tied(nn.Module):
    def __init__(self, tied: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))[:, :2]


def test_tied_weights_are_stored_once_and_untying_is_refused(tmp_path: Path) -> None:
    tied, untied = open_single(Tied(True)), open_single(Tied(False))
    step(tied), step(untied)  # type: ignore[func-returns-value]
    path = saved(tied, tmp_path / "tied")
    shardkit.load_checkpoint(open_single(Tied(True, seed=1)), path)
    message = refused(open_single(Tied(False)), path)
    assert "outer.weight and inner.weight are one tied tensor in the checkpoint and two here" in message
    other = open_single(Tied(False, seed=1))
    loaded = shardkit.load_checkpoint(other, path, strict=False)
    assert "one tied tensor" in loaded.notes[0]
    assert torch.equal(
        tensors(other)["parameter", "inner.weight", None], tensors(other)["parameter", "outer.weight", None]
    )
    message = refused(open_single(Tied(True)), saved(untied, tmp_path / "untied"))
    assert "outer.weight and inner.weight are tied here and two tensors in the checkpoint" in message


def norm_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def test_one_norm_is_not_loaded_into_another(tmp_path: Path) -> None:
    engine = open_single(norm_net(), normalization="sync")
    step(engine)
    path = saved(engine, tmp_path)
    message = refused(open_single(norm_net(), normalization="group"), path)
    assert "normalization: the checkpoint was trained with policy sync, this run has policy group" in message
    assert "1 was BatchNorm(sync) and is GroupNorm(2)" in message and "init_from" in message
    exact = open_single(norm_net(seed=1), normalization="exact")
    assert "the policy was sync and is exact" in shardkit.load_checkpoint(exact, path).notes[0]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        key = ("buffer", f"1.{name}", None)
        assert torch.equal(tensors(exact)[key], tensors(engine)[key])


def test_non_persistent_buffers_and_shapes_of_all_kinds(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.layer = nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.rand(()))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.last = nn.Parameter(torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last))
            self.register_buffer("kept", torch.randint(0, 9, (3,)))
            self.register_buffer("flag", torch.tensor(seed == 0))
            self.register_buffer("lost", torch.rand(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale + self.last.sum()

    engine, other = open_single(Odd(0)), open_single(Odd(1))
    step(engine, 2)
    path = saved(engine, tmp_path)
    shardkit.load_checkpoint(other, path)
    a, b = tensors(engine), tensors(other)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert torch.equal(engine.model.last, other.model.last) and engine.model.last.stride() == other.model.last.stride()
    assert engine.scalars()["scale"].keys() == other.scalars()["scale"].keys()
    assert not any("lost" in key[1] for key in a)
    step(engine), step(other)  # type: ignore[func-returns-value]
    a, b = tensors(engine), tensors(other)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_what_needs_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"own\.scheduler\.fn is a .*object.*cannot be stored without a pickle"):
        saved(open_single(net()), tmp_path, scheduler={"fn": object()})
    assert not list(tmp_path.glob("step-*"))


def test_broken_checkpoints_are_told_when_none_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = open_single(net())
    path = Path(saved(engine, tmp_path))
    (path / "manifest.json").write_text("{}")
    message = refused(engine, str(tmp_path))
    assert "no checkpoint can be used" in message and "manifest.json is damaged" in message
