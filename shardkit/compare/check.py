"""`shardkit check`: the backends agree with one process, on the user's own model and data.

Every place (a backend and a number of processes) runs the recipe twice, from the same weights, on the first items of
its data. Once with SGD and a learning rate so large that the new weights are the gradient, without clipping: the
gradient before clipping, which no backend need show. Once with the recipe's optimizer, accumulating, clipping, with a
ragged last window: losses, gradient norms, weights and buffers after each step, read from checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardkit.compare.apart import Apart, apart, read_state
from shardkit.compare.arms import ArmRequest
from shardkit.compare.jobs import Job
from shardkit.engines.registry import BUILT_IN
from shardkit.errors import RequestError
from shardkit.recipe.schema import Batch, Recipe

REFERENCE = next(name for name, adapter in BUILT_IN.items() if adapter.one_process)
STEPS = 3
# Windows: two full ones and a ragged one.
RATE = 2.0**20
# The weights are then the gradient times it, to the precision of their dtype.
# (loss, grad norm, gradient, weights, buffers): largest relative difference that rounding explains, by precision.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "grad norm": 1e-4, "gradient": 1e-4, "weights": 5e-3, "buffers": 1e-4},
    "bf16": {"loss": 2e-2, "grad norm": 5e-2, "gradient": 1e-1, "weights": 5e-1, "buffers": 5e-2},
}
QUANTITIES: tuple[str, ...] = ("loss", "grad norm", "gradient", "weights", "buffers")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A backend and how many processes."""

    backend: str
    world_size: int
    again: bool = False
    # The reference once more.

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.world_size}{'-again' if self.again else ''}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How one place compares with the reference."""

    place: Place
    error: str = ""
    # Why it did not run.
    errors: dict[str, float]
    # Quantity -> largest relative difference.
    first: str = ""
    # What differs first: a quantity, a step and a tensor.

    @property
    def agrees(self) -> bool:
        return not self.error and not self.first

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "place": self.place.name, "agrees": self.agrees}


def probe_settings(recipe: Recipe, world_size: int, items: int, *, kind: str, clip: float | None) -> list[str]:
    """Overrides that make a recipe the probe `kind` ("gradient" or "steps") at `world_size`.

    Raises:
        RequestError: a global batch cannot be cut into two micro-batches a process.
    """
    batch = recipe.batch
    count = min(items, 2 * batch.global_batch_size + batch.global_batch_size // 2 + 1)
    train = {"_target_": "shardkit.data.first.First", "count": count, "dataset": recipe.data.train}
    settings = [
        f"data.train={json.dumps(train)}",
        "data.eval=null",
        "data.drop_last=false",
        "evaluation={}",
        *cut(batch, world_size),
        "checkpoint={every: 1, keep_last: null}",
        "metrics.every=1",
        f"train.stop_at_step={1 if kind == 'gradient' else STEPS}",
    ]
    if kind == "gradient":
        sgd = json.dumps({"_target_": "torch.optim.SGD", "lr": RATE})
        return [*settings, f"optimizer={sgd}", "parameter_groups=[]", "scheduler=null", "train.max_grad_norm=null"]
    return settings if clip is None else [*settings, f"train.max_grad_norm={clip:.6g}"]


def cut(batch: Batch, world_size: int) -> tuple[str, ...]:
    """Overrides that cut the windows of a recipe for a number of processes.

    Raises:
        RequestError: a global batch cannot be cut into two micro-batches a process.
    """
    micro = micro_batch_size(batch.global_batch_size, batch.micro_batch_size, world_size)
    return f"batch.micro_batch_size={micro}", f"launch.nproc_per_node={world_size}"


def micro_batch_size(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """The largest micro-batch, no larger than the recipe's, that makes two or more of a window on each process.

    Raises:
        RequestError: there is none.
    """
    for size in range(min(micro_batch_size, global_batch_size // (2 * world_size)), 0, -1):
        if global_batch_size % (size * world_size) == 0:
            return size
    raise RequestError(
        f"batch.global_batch_size={global_batch_size} cannot be cut into two micro-batches on each of {world_size} "
        "processes; leave that number out of --world-sizes"
    )


def make_job(arm: ArmRequest, place: Place, folder: Path, kind: str, more: Sequence[str]) -> Job:
    return Job(
        arm=arm,
        repeat=1,
        folder=folder / place.name / kind,
        steps=1 if kind == "gradient" else STEPS,
        settings=tuple(more),
    )


def compare_place(folder: Path, place: Place, reference: Place, start: Any, precision: str) -> Finding:
    """How the runs of a place compare with those of the reference, which both ended well."""
    own, other = folder / place.name, folder / reference.name
    tolerance = TOLERANCES["fp32" if precision == "fp32" else "bf16"]
    errors: dict[str, float] = dict.fromkeys(QUANTITIES, 0.0)
    first = ""

    def see(quantity: str, error: float, where: str) -> None:
        nonlocal first
        errors[quantity] = max(errors[quantity], error)
        if error > tolerance[quantity] and not first:
            first = f"{quantity} {where}: off by {error:.1e}, and {tolerance[quantity]:.0e} is explained by rounding"

    def see_tensors(quantity: str, found: Iterable[Apart], where: str) -> None:
        for each in found:
            see(quantity, each.error, f"{where} of {each.name}")

    # In the order in which a fault shows: the loss, its gradient, the norm of it, the update.
    mine, its = _curves(own / "steps"), _curves(other / "steps")
    see("loss", _relative(mine[1][0], its[1][0]), "at step 1")
    gradient = apart(read_state(own / "gradient", 1), read_state(other / "gradient", 1), start, "parameter")
    see_tensors("gradient", gradient, "before clipping, at step 1,")
    for step in range(1, STEPS + 1):
        see("loss", _relative(mine[step][0], its[step][0]), f"at step {step}")
        see("grad norm", _relative(mine[step][1], its[step][1]), f"at step {step}")
        arm, whole = read_state(own / "steps", step), read_state(other / "steps", step)
        see_tensors("weights", apart(arm, whole, start, "parameter"), f"after step {step}")
        see_tensors("buffers", apart(arm, whole, None, "buffer"), f"after step {step}")
    return Finding(place=place, errors=errors, first=first)


def norm_of(folder: Path) -> float:
    """The gradient norm of the first step of the run in `folder`."""
    return _curves(folder)[1][1]


def _curves(folder: Path) -> dict[int, tuple[float, float]]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"}


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(b), 1e-30)


def cause(finding: Finding, *, noisy: bool, norms: bool, dropout: bool, precision: str) -> str:
    """The likeliest reason for a difference, by a list of rules.

    Args:
        finding: of a place that does not agree.
        noisy: the reference differs from itself when it is run again.
        norms: the model has BatchNorm layers whose statistics are of a rank's micro-batch.
        dropout: the model draws random numbers in training.
        precision: of the recipe.
    """
    if noisy:
        return (
            "the reference differs from itself when run again: something in the model or the data is not deterministic"
        )
    if dropout:
        return "dropout: ranks and micro-batches draw other masks than one process does; compare with dropout off"
    if norms:
        return (
            "BatchNorm statistics: each micro-batch of each rank is normalised by its own; normalization.policy=exact "
            "is the large batch"
        )
    if finding.first.startswith("loss at step 1"):
        return "the forward: the ranks see other items, or the loss is divided otherwise; look at the data and the loss"
    if finding.first.startswith("gradient"):
        return "the backward: a parameter that the backend reduces or scales otherwise, or an output it does not follow"
    if finding.first.startswith("weights"):
        return "the update: an optimizer whose update of a parameter needs the whole tensor, or another weight decay"
    if precision != "fp32":
        return f"precision {precision}: rounding of a reduced precision; check with train.precision=fp32"
    return "unknown: gradients agree and later steps do not; look for state in the model that no checkpoint holds"


def table(reference: Finding, findings: Sequence[Finding], causes: dict[str, str]) -> str:
    """What was found, for a terminal of 100 columns."""
    width = max(len(each.place.name) for each in [reference, *findings])
    lines = [f"{'':{width}}  " + "".join(f"{quantity:>11}" for quantity in QUANTITIES)]
    for each in [reference, *findings]:
        if each.error:
            lines.append(f"{each.place.name:{width}}  failed: {each.error.splitlines()[0]}")
            continue
        verdict = "agrees" if each.agrees else "DIFFERS"
        lines.append(
            f"{each.place.name:{width}}  "
            + "".join(f"{each.errors[quantity]:>11.1e}" for quantity in QUANTITIES)
            + f"  {verdict}"
        )
    for each in findings:
        if each.first:
            lines += [f"{each.place.name}: {each.first}", f"  probably {causes[each.place.name]}"]
    return "\n".join(lines)
