from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shardkit.errors import RecipeError
from shardkit.recipe.build import build, build_scheduler, check_options, check_targets, make_options
from tests.unit.recipe.conftest import Load, Refuse


@dataclass(kw_only=True)
class Options:
    depth: int = 2
    label: str = "a"

    def check(self) -> Iterator[tuple[str, str]]:
        if self.depth > 3:
            yield "depth", "is too deep"


def problems(load_text: Load, *overrides: str) -> list[tuple[str, str, str]]:
    sound = "data.train={_target_: torch.utils.data.TensorDataset}"
    return [(p.place, p.key, p.message) for p in check_targets(load_text(sound, *overrides))]


def test_a_sound_recipe_has_no_problems(load_text: Load) -> None:
    scheduler = "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}"
    adam = "optimizer={_target_: torch.optim.AdamW, lr: 1e-3, betas: [0.9, 0.95]}"
    assert problems(load_text, scheduler, adam) == []


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("optimizer._target_=torch.optim.SDG", "optimizer._target_", "has no 'SDG'; did you mean 'SGD'"),
        ("model._target_=torch.nnn.Linear", "model._target_", "'torch' has no 'nnn'; did you mean 'nn'"),
        ("model._target_=tourch.nn.Linear", "model._target_", "'tourch'; did you mean 'torch'"),
        ("model._target_=torch.nn.Linear.forwrd", "model._target_", "did you mean 'forward'"),
        ("model._target_=torch.nn", "model._target_", "is a module"),
        ("model._target_=torch.float32", "model._target_", "expected a class or a function"),
        ("optimizer.lrr=1", "optimizer.lrr", "did you mean 'lr'"),
        ("optimizer.params=[]", "optimizer.params", "passed by the engine"),
        ("scheduler={_target_: torch.optim.lr_scheduler.StepLR}", "scheduler", "needs the argument"),
        ("model={_target_: torch.nn.Linear, in_features: 3}", "model", "needs the argument 'out_features'"),
        ("loss.weight={_target_: torch.nn.Softmax, dimm: 1}", "loss.weight.dimm", "did you mean 'dim'"),
        ("data.collate={_target_: torch.nope}", "data.collate._target_", "'torch' has no 'nope'"),
        (
            "data.eval={_target_: builtins.dict, x: [{_target_: torch.nope}]}",
            "data.eval.x.0._target_",
            "no 'nope'",
        ),
    ],
)
def test_a_target_that_cannot_be_built_is_found_before(load_text: Load, override: str, key: str, hint: str) -> None:
    ((place, at, message),) = problems(load_text, override)
    assert (place, at) == (f"command line {override!r}", key)
    assert hint in message


def test_problems_of_a_file_have_line_and_column(load_text: Load) -> None:
    loaded = load_text(extra="scheduler:\n  _target_: torch.optim.lr_scheduler.StepLR\n  step_sise: 3\n")
    (problem,) = [p for p in check_targets(loaded) if p.key.startswith("scheduler")]
    assert str(problem).startswith("recipe.yaml:16:3: scheduler.step_sise:")


def test_a_module_that_fails_to_import_says_why(
    load_text: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_at_import.py").write_text("import no_such_thing_at_all\n")
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    ((_, _, message),) = problems(load_text, "model._target_=breaks_at_import.Model")
    assert "no module is named 'no_such_thing_at_all'" in message
    ((_, _, message),) = problems(load_text, "model._target_=raises_at_import.Model")
    assert "RuntimeError: not today" in message
    assert "raises_at_import" not in sys.modules


def test_build_calls_targets_inside_out_and_leaves_the_recipe_alone() -> None:
    target = {
        "_target_": "builtins.dict",
        "layers": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}],
    }
    built = build(target, extra=1)
    assert isinstance(built["layers"][0], torch.nn.Linear)
    assert built["extra"] == 1
    assert target["layers"][0]["_target_"] == "torch.nn.Linear"
    weight = torch.nn.Parameter(torch.zeros(2))
    assert isinstance(build({"_target_": "torch.optim.SGD", "lr": 0.1}, [weight]), torch.optim.SGD)
    with pytest.raises(RecipeError, match="did you mean 'SGD'"):
        build({"_target_": "torch.optim.SDG"})


def test_options_of_others_are_checked_when_they_are_known(load_text: Load) -> None:
    def loaded(options: str):
        return load_text(f"backend={{adapter: 'their.engine:Engine', options: {options}}}")

    sound = loaded("{depth: 3, label: 0123}")
    assert check_options(sound, Options) == []
    assert make_options(sound, Options) == make_options(sound.recipe.backend, Options) == Options(depth=3, label="0123")
    for options, key, hint in [
        ("{dept: 3}", "backend.options.dept", "did you mean 'depth'"),
        ("{depth: x}", "backend.options.depth", "whole number"),
        ("{depth: 4}", "backend.options.depth", "too deep"),
    ]:
        (problem,) = check_options(loaded(options), Options)
        assert problem.key == key
        assert problem.place.startswith("command line")
        assert hint in problem.message
    with pytest.raises(RecipeError, match="did you mean 'depth'"):
        make_options(loaded("{dept: 3}"), Options)


def join(items: list[int], *, sep: str) -> str:
    return sep.join(map(str, items))


def test_a_partial_target_is_the_function_itself(load_text: Load) -> None:
    path = f"{__name__}.join"
    assert problems(load_text, f"data.collate={{_target_: {path}, _partial_: true, sep: '-'}}") == []
    assert build({"_target_": path, "_partial_": True, "sep": "-"})([1, 2]) == "1-2"
    wrong = problems(load_text, f"data.collate={{_target_: {path}, _partial_: yes, sepp: '-'}}")
    keys = {key: message for _, key, message in wrong}
    assert "did you mean 'sep'" in keys["data.collate.sepp"]
    assert "not true or false" in keys["data.collate._partial_"]


def test_evaluating_without_data_to_evaluate_is_refused(refuse: Refuse) -> None:
    (problem,) = refuse("evaluation.every=5")
    assert problem.key == "evaluation.every" and "give data.eval" in problem.message


def test_an_option_of_a_parameter_group_is_one_of_the_optimizer(load_text: Load) -> None:
    group = "parameter_groups=[{match: '*.bias', options: {weight_decy: 0.0}}]"
    ((_, key, message),) = problems(load_text, group)
    assert key == "parameter_groups.0.options.weight_decy" and "did you mean 'weight_decay'" in message


def test_schedulers_nest(load_text: Load) -> None:
    where = "torch.optim.lr_scheduler"
    inner = f"[{{_target_: {where}.ConstantLR, factor: 0.5}}, {{_target_: {where}.ExponentialLR, gamma: 0.9}}]"
    nested = f"scheduler={{_target_: torch.optim.lr_scheduler.SequentialLR, schedulers: {inner}, milestones: [2]}}"
    assert problems(load_text, nested) == []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(load_text("data.train={_target_: builtins.dict}", nested).recipe.scheduler, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 and type(scheduler).__name__ == "SequentialLR"


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("optimizer.lr='0.1'", "optimizer", "cannot be built"),
        ("optimizer.lr=-0.1", "optimizer", "Invalid learning rate"),
        ("optimizer.lr=.nan", "optimizer", "no learning rate"),
        ("optimizer={_target_: torch.optim.LBFGS}", "optimizer", "several times a step"),
        ("optimizer={_target_: torch.nn.ParameterList}", "optimizer", "expected a torch.optim.Optimizer"),
        ("scheduler={_target_: torch.optim.lr_scheduler.LambdaLR, lr_lambda: abc}", "scheduler", "cannot be built"),
    ],
)
def test_what_signatures_do_not_tell_is_tried_out(load_text: Load, override: str, key: str, said: str) -> None:
    ((_, where, message),) = problems(load_text, override)
    assert where == key and said in message


def test_a_module_that_exits_at_its_import_is_a_problem_of_its_key(load_text: Load, tmp_path: Path) -> None:
    (tmp_path / "exits_at_import.py").write_text("import sys; sys.exit(0)")
    sys.path.insert(0, str(tmp_path))
    ((_, key, message),) = problems(load_text, "model={_target_: exits_at_import.Net}")
    assert key == "model._target_" and "SystemExit" in message


@pytest.mark.parametrize("total", [1000000007, 10**38 + 7])
def test_a_large_batch_that_does_not_divide_is_told_at_once(refuse: Refuse, total: int) -> None:
    (problem,) = refuse(f"batch.global_batch_size={total}", "launch.nproc_per_node=2")
    assert "the nearest that work are" in problem.message
