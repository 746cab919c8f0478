"""What a recipe comes to is said before anything runs: per backend, whole, and with nothing left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardkit import shipped
from shardkit.cli import app
from shardkit.engines import registry
from shardkit.errors import RecipeError, RequestError
from shardkit.explain.explain import explain, explain_one
from shardkit.explain.explanation import Explanation, differences
from shardkit.explain.table import table
from shardkit.recipe.load import DEFAULT, Loaded, load

ALL = sorted(shipped.files("backends"))
FOUR = ["ddp", "fsdp2", "zero2", "zero3"]


class LooksAtItself(nn.Linear):
    """Cannot be made on the meta device."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        float(self.weight.detach().sum())


def recipe(*overrides: str, name: str = "digits-resnet") -> Loaded:
    return load(f"recipes/{name}.yaml", overrides, options_of=registry.options_of)


def one(*overrides: str, backend: str = "ddp", ranks: int = 2) -> Explanation:
    return explain(recipe(*overrides), [backend], ranks)[0]


@pytest.fixture(scope="module")
def everywhere() -> list[Explanation]:
    return explain(recipe(), ALL, None)


def test_the_keys_for_machines_are_stable(everywhere: list[Explanation]) -> None:
    for each in everywhere:
        said = json.loads(json.dumps(each.to_json()))
        assert list(said) == [
            "backend", "adapter", "world_size", "device", "accumulation", "dtypes", "loss", "clipping", "nonfinite",
            "unused_parameters", "shards", "reduces", "communication", "communication_least", "communication_notes",
            "scheduler", "normalization", "recomputed", "checkpoint", "model", "settings",
        ]  # fmt: skip
        assert list(said["dtypes"]) == ["storage", "compute", "gather", "reduce", "masters", "norm_statistics"]
        assert all(set(fate) == {"key", "value", "place", "how", "into"} for fate in said["settings"])


def test_the_table_fits_a_terminal_and_shows_every_backend(everywhere: list[Explanation]) -> None:
    for found in (everywhere, everywhere[:3], everywhere[:1], explain(recipe(name="chars-gpt"), FOUR, 2)):
        text = table(found)
        assert max(map(len, text.splitlines())) <= 120
        assert all(each.backend in text for each in found)


def test_what_is_equal_everywhere_stands_once() -> None:
    text = table(explain(recipe(), FOUR, 2))
    (line,) = [line for line in text.splitlines() if line.startswith("storage")]
    assert line.split() == ["storage", "fp32"]


def test_a_backend_of_one_process_is_explained_on_one(everywhere: list[Explanation]) -> None:
    sizes = {each.backend: each.world_size for each in everywhere}
    assert sizes["single"] == 1 and {size for name, size in sizes.items() if name != "single"} == {2}
    (refused,) = one(backend="single").refused
    assert refused.key == "launch.nproc_per_node" and "runs 1 process, not 2" in refused.into


def test_every_setting_that_is_given_has_a_fate() -> None:
    loaded = recipe("train.precision=bf16-mixed", "parameter_groups=[{match: '*.bias', options: {lr: 0.2}}]")
    for each in explain(loaded, FOUR, 2):
        fates = {fate.key: fate for fate in each.settings}
        given = {key for key, place in loaded.origins.items() if key and place != DEFAULT and key[:7] != "backend"}
        leaves = {key for key in given if not any(other.startswith(f"{key}.") for other in loaded.origins)}
        assert leaves - set(fates) == set()
        assert fates["parameter_groups.0.options.lr"].value == 0.2
        assert fates["train.precision"].place == "command line 'train.precision=bf16-mixed'"


def test_settings_are_translated_or_refused_with_their_sentence() -> None:
    loaded = recipe("backend=zero2", "backend.options.overlap_comm=true", "train.precision=bf16-true")
    fates = {each.backend: {f.key: f for f in each.settings} for each in explain(loaded, FOUR, 2)}
    assert fates["zero2"]["backend.options.overlap_comm"].into == "zero_optimization.overlap_comm=True"
    assert fates["zero3"]["backend.options.overlap_comm"].how == "translated"
    assert fates["ddp"]["backend.options.overlap_comm"].how == "refused"
    assert "expected find_unused_parameters" in fates["ddp"]["backend.options.overlap_comm"].into
    assert fates["zero2"]["train.precision"].how == "refused"
    assert "does not train in bf16-true" in fates["zero2"]["train.precision"].into
    assert fates["fsdp2"]["train.precision"].into == "parameters in bf16"
    assert fates["zero3"]["train.max_grad_norm"].into == "gradient_clipping=5.0"
    assert "does plain DDP" in str(one(backend="accelerate-fsdp2").refused) or "do plain DDP" in str(
        one(backend="accelerate-fsdp2").refused
    )


def test_a_world_that_does_not_fit_is_refused_by_name() -> None:
    (refused,) = one(ranks=5).refused
    assert refused.key == "batch.global_batch_size" and "the nearest that work are" in refused.into


def test_precision_is_said_per_backend() -> None:
    said = {each.backend: each.to_json()["dtypes"] for each in explain(recipe("train.precision=bf16-mixed"), FOUR, 2)}
    assert {each["compute"] for each in said.values()} == {"bf16"}
    assert {each["reduce"] for each in said.values()} == {"fp32"}
    assert {each["norm_statistics"] for each in said.values()} == {"fp32"}
    assert [said[name]["gather"] for name in FOUR] == ["none", "bf16", "fp32", "fp32"]


def test_the_schedule_is_that_of_the_whole_run() -> None:
    said = one("train.max_steps=10").to_json()["scheduler"]
    rates, optimizer = [], torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert (said["first_lr"], said["last_lr"], said["steps"]) == (rates[0], rates[-1], 10)
    # 1437 images in windows of 96.
    epochs = one("train.max_steps=null", "train.max_epochs=2", "scheduler=null").to_json()["scheduler"]
    assert epochs["steps"] == 30 and epochs["class"] == "none" and epochs["steps_per_optimizer_step"] == 0


def test_norm_layers_are_said_after_the_policy() -> None:
    said = one("normalization.policy=exact").to_json()["normalization"]
    assert said["layers"] == ["9 x BatchNorm2d -> BatchNorm(exact): statistics of the whole logical batch"]
    chosen = one("normalization.policy=auto").to_json()["normalization"]
    assert chosen["policy"] == "exact" and "micro-batches" in chosen["explanation"]


def test_blocks_that_are_recomputed_are_named_and_the_setting_is_consumed() -> None:
    for value, names in (("blocks", ["stages.0", "stages.1", "stages.2"]), ("2", ["stages.0", "stages.2"])):
        for each in explain(recipe(f"activation_checkpointing={value}"), FOUR, 2):
            (fate,) = [fate for fate in each.settings if fate.key == "activation_checkpointing"]
            assert fate.how == "consumed" and "recompute themselves" in fate.into
            assert each.to_json()["recomputed"] == names and ", ".join(names) in table([each])
    assert one().to_json()["recomputed"] == []
    # Once, by whichever asks: exact recomputes all that hold norms.
    assert one("normalization.policy=exact", "activation_checkpointing=2").to_json()["recomputed"] == [
        "stages.0", "stages.1", "stages.2",
    ]  # fmt: skip


def test_blocks_that_cannot_be_recomputed_are_refused_at_their_key() -> None:
    overrides = [
        "activation_checkpointing=blocks",
        "model={_target_: torch.nn.Linear, in_features: 64, out_features: 10}",
    ]
    (refused,) = one(*overrides).refused
    assert refused.key == "activation_checkpointing" and "no blocks are found in Linear" in refused.into
    within = ["activation_checkpointing=blocks", "normalization.policy=exact", "normalization.exact.blocks=[Block]"]
    (refused,) = one(*within).refused
    assert refused.key == "activation_checkpointing" and "block 'stages.0' holds 'stages.0.0'" in refused.into


def test_exact_makes_one_forward_of_a_window() -> None:
    keep, exact = (one(f"normalization.policy={policy}", backend="fsdp2").to_json() for policy in ("keep", "exact"))
    assert keep["accumulation"] == exact["accumulation"] == 2
    # 14 all-gathers are 7 a micro-step; exact has one, and one more a layer for its statistics.
    assert keep["communication"]["all_gather"]["calls"] == 14
    assert exact["communication"]["all_gather"]["calls"] == 7 + 9


def test_a_model_takes_no_memory_and_one_that_cannot_do_so_is_said() -> None:
    large = load(
        "recipes/chars-gpt.yaml",
        ["model.width=4096", "model.heads=32", "model.layers=32"],
        options_of=registry.options_of,
    )
    said = explain(large, ["zero3"], 8)[0].to_json()
    assert said["model"]["parameters"] > 6e9 and said["model"]["built_on"].startswith("the meta device")
    # Most of it is used again only after 10^9 elements, and so gathered twice a micro-step.
    psi = 4 * said["model"]["parameters"]
    assert 1.8 * psi < said["communication"]["all_gather"]["bytes"] < 2 * psi
    target = f"model={{_target_: {__name__}.LooksAtItself}}"
    assert one(target).to_json()["model"]["built_on"].startswith("the CPU: on the meta device it raises")


def test_differences_name_what_was_planted() -> None:
    base = one()
    planted = {
        "recipe.train.max_grad_norm": one("train.max_grad_norm=null"),
        "recipe.data.shuffle": one("data.shuffle=false"),
        "recipe.optimizer.weight_decay": one("optimizer.weight_decay=0.1"),
        "recipe.seed": one("seed=1"),
        "dtypes.compute": one("train.precision=bf16-mixed"),
        "normalization.policy": one("normalization.policy=sync"),
        "recipe.scheduler.T_max": one("scheduler.T_max=300"),
        "world_size": one(ranks=1),
        "shards": one(backend="zero2"),
    }
    for key, other in planted.items():
        found = {name: (a, b) for name, a, b in differences(base, other)}
        assert key in found, (key, found)
        assert found[key][0] != found[key][1]
    assert differences(base, one("metrics.every=5", "name=other", "run_dir=elsewhere")) == []
    assert differences(base, one()) == []


def test_an_engine_that_states_nothing_is_explained_by_its_traits() -> None:
    said = one(backend="tests.third_party.engines:ManualEngine").to_json()
    assert said["communication"] is None and said["shards"] == "nothing" and said["dtypes"]["storage"] == "fp32"
    assert "not known" in table([one(backend="tests.third_party.engines:ManualEngine")])


def test_a_recipe_that_is_wrong_everywhere_is_refused() -> None:
    with pytest.raises(RecipeError, match="has no argument 'depht'"):
        explain_one(recipe("model.depht=3"))
    with pytest.raises(RequestError, match="no backend is named 'zero4'"):
        explain(recipe(), ["zero4"])
    with pytest.raises(RequestError, match="cannot be built"):
        explain_one(recipe("model.depth=9"))


def test_what_the_model_refuses_is_told_at_its_key() -> None:
    for override, key in (
        ("blocks=[nowhere.*]", "blocks"),
        ("normalization.rules=[{match: nowhere, policy: keep}]", "normalization.policy"),
        ("parameter_groups=[{match: nowhere, options: {}}]", "parameter_groups"),
    ):
        refused = {fate.key: fate.into for fate in one(override).refused}
        assert "nowhere" in refused[key]


def test_an_optimizer_that_wants_a_device_leaves_its_tensors_unknown() -> None:
    said = one("optimizer={_target_: torch.optim.AdamW, lr: 0.1, fused: true}").to_json()["checkpoint"]
    assert said["tensors"] is None and said["parameters_bytes"] == 4 * 77754
    said = one("optimizer={_target_: torch.optim.AdamW, lr: 0.1}").to_json()["checkpoint"]
    assert said["tensors"] == 3 * 29 + 27 and said["optimizer_bytes"] == 8 * 77754


def test_the_command_prints_the_table_or_json(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["explain", "recipes/digits-resnet.yaml", *arguments])

    shown = run("--backends", "ddp,zero2", "train.max_steps=5")
    assert shown.exit_code == 0 and "all-reduce a step" in shown.stdout
    read = json.loads(run("--backends", "ddp,zero2", "--world-size", "4", "--json").stdout)
    assert [(each["backend"], each["world_size"], each["accumulation"]) for each in read] == [
        ("ddp", 4, 1),
        ("zero2", 4, 1),
    ]
    assert [each["backend"] for each in json.loads(run("--json").stdout)] == ["ddp"]
    wrong = run("--backends", "ddp,zero4")
    assert wrong.exit_code == 2 and "zero4" in wrong.output
    assert list(tmp_path.iterdir()) == []


class Temperature(nn.Linear):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def test_a_parameter_that_cannot_be_cut_is_refused_where_parameters_are_cut() -> None:
    loaded = recipe("model={_target_: tests.unit.test_explain.Temperature}")
    cut, whole = explain(loaded, ["fsdp2", "ddp"], 2)
    refused = [fate for fate in cut.settings if "temperature has no dimension" in str(fate)]
    assert len(refused) == 1 and not cut.sections
    assert whole.sections and "temperature has no dimension" not in str(whole.settings)


def test_the_learning_rate_is_that_of_the_first_group() -> None:
    groups = 'parameter_groups=[{match: "*.weight", options: {lr: 0.5}}, {match: "*", options: {lr: 0.25}}]'
    said = one(groups, "scheduler=null").to_json()["scheduler"]
    assert (said["first_lr"], said["last_lr"]) == (0.5, 0.5)


def test_a_schedule_that_ends_before_the_run_does_is_told() -> None:
    short = "scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1, total_steps: 5}"
    found = one(short, "train.max_steps=10")
    said = found.to_json()["scheduler"]
    assert said["last_lr"] is None and said["fails"].startswith("ValueError: Tried to step")
    assert "of which it cannot make all (ValueError" in " ".join(table([found]).split())
