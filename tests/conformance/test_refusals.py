"""What no backend may do in silence: each mistake ends in an error that says what to do, on every rank at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardkit.engines import registry
from shardkit.engines.api import Traits
from shardkit.recipe.backend import load_backend
from shardkit.recipe.build import make_options
from tests.conformance.cases import Case
from tests.conformance.conftest import ONE_PROCESS, backend_named


@pytest.fixture(scope="module")
def refusals(launch_ranks: Callable[..., list[Any]]) -> Callable[[str], dict[str, str]]:
    kept: dict[str, dict[str, str]] = {}

    def run(backend: str) -> dict[str, str]:
        if backend not in kept:
            one = ":" not in backend and backend_named(backend).adapter in ONE_PROCESS
            ranks = launch_ranks(1 if one else 2, "run_refusals", backend_named(backend))
            for rank in ranks[1:]:
                assert rank.keys() == ranks[0].keys()
            kept[backend] = ranks[0]
        return kept[backend]

    return run


def traits_of(backend: str) -> Traits:
    chosen = backend_named(backend)
    adapter = registry.load(chosen.adapter)
    return adapter.describe(make_options(chosen, adapter.Options))


def test_an_unused_parameter_is_kept_or_refused_by_name(refusals: Any, backend: str) -> None:
    # B32.
    found, kind = refusals(backend), traits_of(backend).unused_parameters
    decayed, plain = found["unused, decayed"], found["unused, not decayed"]
    if kind == "kept":
        assert decayed == plain == "no error"
        assert found["moved by decay 0.5"] == found["moved by decay 0.0"] == "0.0"
    elif kind == "refused":
        for message in (decayed, plain):
            assert message.startswith("EngineError") and "spare.weight" in message
            assert "find_unused_parameters=true" in message
    else:
        assert decayed.startswith("EngineError") and "spare.weight" in decayed and "weight_decay 0" in decayed
        assert plain == "no error" and found["moved by decay 0.0"] == "0.0"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_parameter_that_some_windows_leave_out_is_kept_or_refused(
    refusals: Any, backend: str, optimizer: str
) -> None:
    # ZeRO 3 would apply the last gradient again, ZeRO 1 and 2 what the optimizer remembers.
    message = refusals(backend)[f"sometimes, {optimizer}"]
    if traits_of(backend).unused_parameters == "kept":
        assert message == "no error" and refusals(backend)["sometimes moved"] == "0.0"
    else:
        assert message.startswith("EngineError") and "extra.weight" in message


def test_a_dataclass_as_output_is_seen_through_or_refused(refusals: Any, one_process: Any, backend: str) -> None:
    # B43: DeepSpeed 0.19.8 looks for tensors in tuples, lists and mappings only.
    message = refusals(backend)["dataclass output"]
    if "parameters" in traits_of(backend).shards and backend_named(backend).options.get("stage") == 3:
        assert message.startswith("EngineError") and "Output" in message and "return a tuple or a dict" in message
    else:
        assert message == "no error"
        want = one_process(Case("dataclass", output="dataclass"))["losses"][1]
        assert float(refusals(backend)["dataclass loss"]) == pytest.approx(want, rel=2e-6)


def test_ranks_that_built_different_models_are_refused(refusals: Any, backend: str) -> None:
    message = refusals(backend)["other shapes"]
    if backend_named(backend).adapter in ONE_PROCESS:
        assert message == "no error"
    else:
        assert message.startswith("BackendError: the model is not the same on all ranks") and "weight (" in message


def test_a_parameter_that_is_not_contiguous_is_refused_where_it_cannot_be_cut(refusals: Any, backend: str) -> None:
    message = refusals(backend)["channels last"]
    if traits_of(backend).shards:
        assert message.startswith("BackendError") and "weight is not contiguous" in message
    else:
        assert message == "no error"


def test_a_method_of_the_model_is_right_or_refused_but_never_silently_wrong(refusals: Any, backend: str) -> None:
    # B29, B30: DDP would leave the ranks apart, FSDP2 has no gathered weights there.
    found = refusals(backend)
    assert found["method of the model"] == "no error"
    assert found["method"] in ("right", "AttributeError", "RuntimeError")


def test_a_nan_names_step_rank_and_micro_batch(refusals: Any, backend: str) -> None:
    # B45: the same reaction on all.
    message = refusals(backend)["nonfinite"]
    assert message.startswith("NonFiniteError: step 7: the loss is nan on rank ")
    assert "micro-batch" in message and "train.nonfinite=skip" in message


def test_windows_of_different_lengths_are_refused_before_they_hang(refusals: Any, backend: str) -> None:
    # B75.
    message = refusals(backend)["uneven windows"]
    if backend_named(backend).adapter in ONE_PROCESS:
        assert message == "no error"
    else:
        assert message.startswith("WindowError") and "micro-batches in this window" in message


def test_an_empty_window_is_refused(refusals: Any, backend: str) -> None:
    assert refusals(backend)["empty window"].startswith("WindowError: this window has no micro-batch")


def test_an_optimizer_over_other_parameters_is_refused(refusals: Any, backend: str) -> None:
    # B28.
    message = refusals(backend)["stranger in the optimizer"]
    assert message.startswith("BackendError") and "not handed to make_optimizer" in message


def test_a_parameter_without_dimension_is_refused_where_it_cannot_be_cut(refusals: Any, backend: str) -> None:
    message, shards = refusals(backend)["no dimension"], traits_of(backend).shards
    if shards:
        assert message.startswith("BackendError") and "gain" in message and "[1]" in message
    else:
        assert message == "no error"


def test_trainable_parameters_of_two_dtypes_are_refused_where_they_cannot_be_cut(refusals: Any, backend: str) -> None:
    message, shards = refusals(backend)["two dtypes"], traits_of(backend).shards
    if shards:
        assert message.startswith("BackendError") and "cannot shard the model" in message and "bfloat16" in message
        assert "model.float()" in message
    else:
        assert message == "no error"


def test_blocks_that_match_nothing_are_refused_where_they_are_used(refusals: Any, backend: str) -> None:
    # B33.
    message = refusals(backend)["wrong blocks"]
    assert message.startswith("BackendError") and "'layers.*' matches no module" in message
    assert "blocks.*" in message and "Block" in message


def test_an_optimizer_that_shards_would_break_is_refused(refusals: Any, backend: str) -> None:
    message = refusals(backend)["adafactor"]
    if "Adafactor" in traits_of(backend).refused_optimizers:
        assert message.startswith("BackendError") and "Adafactor" in message and "AdamW" in message
    else:
        assert message == "no error"


def test_a_model_without_trainable_parameters_is_refused(refusals: Any, backend: str) -> None:
    assert refusals(backend)["nothing to train"].startswith("BackendError: the model has no parameter")


def test_precisions_are_honoured_or_refused(refusals: Any, backend: str) -> None:
    found, precisions = refusals(backend), traits_of(backend).precisions
    if "bf16-true" in precisions:
        assert found["bf16-true"] == "no error" and found["bf16-true dtypes"] == "torch.bfloat16"
    else:
        assert "does not train in bf16-true" in found["bf16-true"]
    assert "does not train in fp16-mixed" in found["fp16-mixed"] and "bf16-mixed" in found["fp16-mixed"]


def test_a_second_engine_in_one_process_works_or_is_refused(refusals: Any, backend: str) -> None:
    # B52, B57.
    found = refusals(backend)
    if backend.startswith("accelerate"):
        assert found["second engine"].startswith("EngineError: this process has an Accelerator already")
    else:
        assert found["second engine"] == "no error" and found["second engine differs by"] == "0.0"


def test_accelerate_fsdp2_on_a_cpu_says_what_to_use_instead(launch_ranks: Any) -> None:
    results = launch_ranks(
        2, "open_plain", load_backend("accelerate-fsdp2", options_of=registry.options_of), errors=True
    )
    for kind, message, _ in results:
        assert kind == "BackendError"
        assert "does not shard on a CPU" in message and "backend=fsdp2" in message


def test_single_refuses_a_second_process(launch_ranks: Any) -> None:
    results = launch_ranks(2, "open_plain", load_backend("single", options_of=registry.options_of), errors=True)
    for kind, message, _ in results:
        assert kind == "BackendError"
        assert "runs 1 process, not 2" in message and "launch.nproc_per_node=1" in message
