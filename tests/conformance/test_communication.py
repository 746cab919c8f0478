"""What is counted is what the theory of each backend says, to the byte: all-reduce, reduce-scatter and all-gather.

`python -m pytest tests/conformance/test_communication.py --communication-table docs/communication.md` writes the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardkit.checkpoint.inspection import as_json
from shardkit.checkpoint.place import one
from shardkit.communication import Traffic, Volume, added
from shardkit.engines import registry
from shardkit.engines.activations import recomputed_blocks
from shardkit.engines.anatomy import Anatomy, anatomy
from shardkit.engines.meaning import Meaning, Situation, meaning_of
from shardkit.engines.names import trainable
from shardkit.explain.explain import explain
from shardkit.explain.own import own_traffic
from shardkit.normalization.policy import apply_policy
from shardkit.recipe.build import make_options
from shardkit.recipe.load import load
from shardkit.recipe.schema import Backend, Normalization, Policy
from shardkit.world import World
from tests.conformance.cases import Case, build_model, build_optimizer
from tests.conformance.conftest import backend_named

OWN: Traffic = {"all_reduce": Volume(2, 40)}
# shardkit's in any step that writes a line: four fp64 numbers before the window (how many items, how many
# micro-batches), one after it (the loss).
PAPER = [("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)]
PAPER += [("ddp", 4), ("fsdp2", 4), ("zero2", 4), ("zero3", 4)]
OTHERS: list[tuple[str, int, dict[str, Any]]] = [
    ("ddp", 2, {"find_unused_parameters": True}),
    ("fsdp2", 2, {"reshard_after_forward": False}),
    ("fsdp2", 2, {"reduce_each_micro_step": True}),
    ("hsdp", 4, {}),
    ("hsdp", 4, {"reduce_each_micro_step": True}),
    ("zero1", 2, {"round_robin_gradients": True}),
    ("zero2", 2, {"offload_optimizer": True}),
    ("zero3", 2, {"stage3_param_persistence_threshold": 20}),
    ("zero3", 2, {"stage3_max_reuse_distance": 10**9}),
    ("zero3", 2, {"stage3_max_reuse_distance": 100, "stage3_prefetch_bucket_size": 200}),
    ("zero3", 2, {"stage3_prefetch_bucket_size": 15}),
    ("zero3-offload", 2, {}),
    ("accelerate-ddp", 2, {}),
    ("accelerate-fsdp2", 2, {}),
    ("accelerate-zero2", 2, {}),
    ("accelerate-zero3", 2, {}),
]
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
BEGIN, END = "<!-- counted: begin -->", "<!-- counted: end -->"


def case(name: str, world: int, micro_steps: int, **more: Any) -> Case:
    windows = (4 * world * micro_steps,) * 3
    return Case(name, windows=windows, micro_batch_size=4, optimizer="adamw", max_grad_norm=1.0, **more)


def variants(world: int) -> list[Case]:
    again = [
        case(f"{model} again", world, 2, model=model, activation_checkpointing="blocks")
        for model in ("plain", "frozen", "tied")
    ]
    return [
        *again,
        case("plain", world, 2),
        case("groups", world, 2, groups=True),
        case("frozen", world, 2, model="frozen"),
        case("tied", world, 2, model="tied"),
        case("batchnorm-bf16", world, 2, model="batchnorm", precision="bf16-mixed"),
        case("bf16-mixed", world, 2, precision="bf16-mixed"),
        case("bf16-true", world, 2, precision="bf16-true"),
    ]


def looked_at(case: Case) -> Anatomy:
    model = build_model(case)
    names = {id(p): name for name, p in trainable(model)}
    groups = build_optimizer(case, trainable(model)).param_groups
    again = recomputed_blocks(model, Normalization(), ["blocks.*"], case.activation_checkpointing)
    return anatomy(
        model,
        ["blocks.*"],
        [[names[id(p)] for p in group["params"]] for group in groups],
        [block for block, _ in again],
    )


def meaning(backend: Backend, case: Case, world: int) -> Meaning:
    adapter = registry.load(backend.adapter)
    situation = Situation(
        anatomy=looked_at(case),
        world_size=world,
        accumulation=len(case.cells(0, world)),
        precision=case.precision,  # type: ignore[arg-type]
        max_grad_norm=case.max_grad_norm,
    )
    return meaning_of(adapter, make_options(backend, adapter.Options), situation)


def check(counted: list[dict[str, tuple[int, int]]], meaning: Meaning) -> None:
    assert meaning.traffic is not None
    want = {kind: volume for kind, volume in added(meaning.traffic, OWN).items() if volume.bytes}
    for rank in counted:
        assert {kind: size for kind, (_, size) in rank.items()} == {kind: v.bytes for kind, v in want.items()}
        assert {kind: rank[kind][0] for kind, v in want.items() if v.calls is not None} == {
            kind: v.calls for kind, v in want.items() if v.calls is not None
        }


@pytest.fixture(scope="module")
def paper(launch_ranks: Callable[..., list[Any]], request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`paper(backend, world)`: accumulation -> counts of each rank; the table is written when all were asked for."""
    kept: dict[tuple[str, int], dict[int, list[dict[str, tuple[int, int]]]]] = {}

    def counts(name: str, world: int) -> dict[int, list[dict[str, tuple[int, int]]]]:
        if (name, world) not in kept:
            cases = [case(str(steps), world, steps) for steps in (1, 4)]
            ranks = launch_ranks(world, "tests.conformance.communication_ranks:count_steps", backend_named(name), cases)
            kept[name, world] = {int(c.name): [rank[c.name] for rank in ranks] for c in cases}
        return kept[name, world]

    yield counts
    path = request.config.getoption("--communication-table")
    if path and set(kept) == set(PAPER):
        write(Path(path), table(kept))


@pytest.mark.parametrize(("name", "size"), PAPER)
def test_counted_is_the_theory_with_and_without_accumulation(paper: Any, name: str, size: int) -> None:
    for steps, counted in paper(name, size).items():
        check(counted, meaning(backend_named(name), case("", size, steps), size))


@pytest.mark.parametrize(("name", "size"), [place for place in PAPER if place[1] == 2])
def test_counted_is_the_theory_where_blocks_are_recomputed(
    launch_ranks: Callable[..., list[Any]], name: str, size: int
) -> None:
    cases = [case(f"{value}, {k}", size, k, activation_checkpointing=value) for k in (1, 2) for value in ("blocks", 2)]
    ranks = launch_ranks(size, "tests.conformance.communication_ranks:count_steps", backend_named(name), cases)
    for each in cases:
        assert sum(weight.recomputed for weight in looked_at(each).weights) == (12 if "blocks" in each.name else 6)
        check([rank[each.name] for rank in ranks], meaning(backend_named(name), each, size))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "options"), OTHERS)
def test_counted_is_the_theory_for_every_option_and_precision(
    launch_ranks: Callable[..., list[Any]], name: str, size: int, options: dict[str, Any]
) -> None:
    backend = backend_named(name)
    backend = replace(backend, options={**backend.options, **options})
    adapter = registry.load(backend.adapter)
    precisions = adapter.describe(make_options(backend, adapter.Options)).precisions
    cases = [each for each in variants(size) if each.precision in precisions]
    ranks = launch_ranks(size, "tests.conformance.communication_ranks:count_steps", backend, cases)
    for each in cases:
        check([rank[each.name] for rank in ranks], meaning(backend, each, size))


@pytest.mark.parametrize("policy", ["sync", "deferred", "exact"])
def test_counted_is_the_theory_for_norms_that_share_statistics(
    launch_ranks: Callable[..., list[Any]], policy: Policy
) -> None:
    backend, each = backend_named("ddp"), case(policy, 2, 2, model="batchnorm")
    ranks = launch_ranks(2, "tests.conformance.communication_ranks:count_steps", backend, [each])
    applied = apply_policy(build_model(each), Normalization(policy=policy), world=World())
    # Under exact a window is one forward.
    own = own_traffic(applied.layers, world_size=2, micro_steps=1 if policy == "exact" else 2)
    meant = meaning(backend, each, 2)
    for rank in ranks:
        want = added(meant.traffic or {}, own)
        assert {kind: size for kind, (_, size) in rank[policy].items()} == {kind: v.bytes for kind, v in want.items()}
    assert own_traffic((), world_size=2, micro_steps=1) == OWN and own_traffic((), world_size=1, micro_steps=1) == {}


def test_a_profile_changes_no_loss_and_says_what_explain_says(
    launch_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    recipe, overrides = "recipes/digits-resnet.yaml", ["backend=zero2", "train.max_steps=6", "checkpoint.every=2"]
    runs = {}
    for name, more in {"with": ["metrics.profile=true"], "without": []}.items():
        arguments = (recipe, [*overrides, "evaluation.every=3", *more], str(tmp_path / name))
        runs[name] = launch_ranks(2, "tests.conformance.run_ranks:run_recipe", *arguments)[0]
    assert runs["with"]["losses"] == runs["without"]["losses"] and len(runs["with"]["losses"]) == 6
    assert not (tmp_path / "without" / "profile.json").exists()
    profile = json.loads((tmp_path / "with" / "profile.json").read_text())
    (said,) = explain(load(recipe, overrides, options_of=registry.options_of), ["zero2"], 2)
    for rank in profile["ranks"]:
        assert {k: v["bytes"] for k, v in rank["communication"].items()} == {
            kind: volume["bytes"] for kind, volume in said.to_json()["communication"].items()
        }
        assert rank["host_bytes"] > 10**7 and rank["allocated_bytes"] is None
    assert profile["steps"] == 6 and profile["save_seconds"] > 0 and profile["load_seconds"] is None
    held = as_json(one(str(tmp_path / "with")), one(str(tmp_path / "with")).manifest())["contents"]
    for key in ("tensors", "bytes"):
        assert sum(kind[key] for kind in held if kind["kind"] != "rng") == said.to_json()["checkpoint"][key]
    assert profile["checkpoint_bytes"] > said.to_json()["checkpoint"]["bytes"]
    resumed = launch_ranks(
        2,
        "tests.conformance.run_ranks:run_recipe",
        recipe,
        [*overrides[:1], "train.max_steps=8", "metrics.profile=true"],
        str(tmp_path / "with"),
    )
    assert set(resumed[0]["losses"]) >= {7, 8}
    assert json.loads((tmp_path / "with" / "profile.json").read_text())["load_seconds"] > 0


def test_collectives_of_every_kind_are_counted_and_a_context_over(launch_ranks: Callable[..., list[Any]]) -> None:
    ranks = launch_ranks(2, "tests.conformance.communication_ranks:count_kinds")
    tensor, numbers = 4 * 6, 8 * 6
    for rank in ranks:
        assert rank["outer"] == {
            "all_reduce": (2, tensor * 2),
            "broadcast": (1, tensor),
            "reduce": (1, tensor),
            "all_gather": (2, numbers * 2),
            "reduce_scatter": (1, tensor),
            "gather": (1, tensor * 2),
            "scatter": (1, tensor * 2),
            "all_to_all": (1, tensor),
            "barrier": (1, 0),
            ("send" if rank["rank"] == 0 else "receive"): (1, tensor),
        }
        assert rank["inner"] == {"all_reduce": (1, tensor)}
        assert rank["after"] == {} and rank["kernels"] == 0


def table(kept: dict[tuple[str, int], dict[int, list[dict[str, tuple[int, int]]]]]) -> str:
    psi = sum(weight.numel for weight in looked_at(case("", 2, 1)).weights) * 4
    head = "| backend | ranks | K | " + " | ".join(f"{kind.replace('_', '-')}: counted = theory" for kind in KINDS)
    lines = [head + " | in psi: all-reduce, reduce-scatter, all-gather | the least, in psi |", "|" + "---|" * 8]
    for (name, world), by_steps in kept.items():
        for steps, counted in by_steps.items():
            meant = meaning(backend_named(name), case("", world, steps), world)
            got = {kind: counted[0].get(kind, (0, 0))[1] for kind in KINDS}
            want = added(meant.traffic or {}, OWN)
            cells = [_equal(got[kind], want.get(kind, Volume(0, 0)).bytes) for kind in KINDS]
            psis = ", ".join(f"{got[kind] / psi:.2f}" for kind in KINDS)
            least = ", ".join(f"{(meant.least or {}).get(k, Volume(0, 0)).bytes / psi:.0f}" for k in KINDS)
            lines.append(f"| {name} | {world} | {steps} | " + " | ".join(cells) + f" | {psis} | {least} |")
    return "\n".join([f"psi = {psi} bytes, all parameters in fp32; bytes per optimizer step and rank.", "", *lines])


def _equal(got: int, want: int) -> str:
    return f"{got:,}" if got == want else f"**{got:,}** (theory {want:,})"


def write(path: Path, text: str) -> None:
    """Between the marks of a page that has them, else as the whole file."""
    old = path.read_text() if path.exists() else ""
    if BEGIN in old:
        text = f"{old.split(BEGIN)[0]}{BEGIN}\n\n{text}\n\n{END}{old.split(END)[1]}"
    path.write_text(text if BEGIN in old else text + "\n")
