"""How the runs of one place compare with those of the reference, and what is probably the cause."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.source import Source
from shardkit.compare.apart import Apart, State, apart, moved, read_state
from shardkit.compare.place import RECUT, WHOLE, Place
from shardkit.jobs import status

QUANTITIES: tuple[str, ...] = ("loss", "grad norm", "gradient", "weights", "buffers")
# Largest relative difference that rounding explains.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "grad norm": 1e-4, "gradient": 1e-4, "weights": 5e-3, "buffers": 1e-4},
    "bf16": {"loss": 2e-2, "grad norm": 5e-2, "gradient": 1e-1, "weights": 5e-1, "buffers": 5e-2},
}
# Adam makes more or less of rounding by model: what cutting windows otherwise does to one process's weights, times
# this, is the tolerance in fp32 where it is less; no less than that.
MARGIN, LEAST = 30.0, 1e-4
# (small, unsteady, tiny): a gradient is rounding where it is `small` beside the largest (root mean squares) and further
# than `unsteady` from itself when windows are cut otherwise, or where it is `tiny`. A bias before BatchNorm has such a
# gradient, and that of keys in attention: it is 0 but for rounding, of which Adam makes whole steps.
# Measured: 7e-9 and 3e-8 in fp32, 3.5e-4 in bf16.
ROUNDING = {"fp32": (1e-3, 1e-3, 1e-6), "bf16": (1e-1, 1e-1, 1e-4)}
TINY_JOINED = {"fp32": 1e-6, "bf16": 1e-3}
# Where a window is one forward however it is cut, as under policy exact.


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What places are held to: the reference's runs in a folder, and how far from them is no evidence."""

    folder: Path
    start: Source | None
    # The weights that all began with; None = not known.
    steps: int
    kind: str
    # A key of TOLERANCES.
    tolerance: dict[str, float]
    rounding: tuple[str, ...] = ()
    # Parameters whose gradient is 0 but for rounding: they are not compared.


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How one place compares with the reference."""

    place: Place
    error: str = ""
    # Why it did not run.
    errors: dict[str, float]
    # Quantity -> largest relative difference.
    norm: float = 0.0
    # Of the first gradient's norm.
    first: str = ""
    # What differs first: a quantity, a step and a tensor.

    @property
    def agrees(self) -> bool:
        return not self.error and not self.first

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "place": self.place.name, "agrees": self.agrees}


def reference(folder: Path, start: Source | None, precision: str, steps: int) -> Reference:
    """The reference in `folder`, whose runs ended well."""
    kind = "fp32" if precision == "fp32" else "bf16"
    whole, recut = (folder / place.name / "gradient" for place in (WHOLE, RECUT))
    own = read_state(whole, 1)
    # The other one may have failed, as BatchNorm does on one value a channel.
    other = read_state(recut, 1) if status(recut) == "completed" else own
    small, unsteady, tiny = ROUNDING[kind]
    sizes = moved(own, start)
    largest = max(sizes.values(), default=0.0)
    found = apart(other, own, start, "parameter")
    if not any(each.error for each in found):
        tiny = TINY_JOINED[kind]
    rounding = [
        each.name
        for each in found
        if 0.0 < sizes[each.name] < tiny * largest
        or (sizes[each.name] < small * largest and unsteady < each.error < float("inf"))
    ]
    return Reference(
        folder=folder, start=start, steps=steps, kind=kind, tolerance=TOLERANCES[kind], rounding=tuple(rounding)
    )


def narrowed(tolerance: dict[str, float], recut: Finding) -> dict[str, float]:
    """A tolerance with that of weights as narrow as rounding is in the model at hand, where that shows."""
    if not any(recut.errors.values()):
        return tolerance
    return {**tolerance, "weights": min(tolerance["weights"], max(LEAST, MARGIN * recut.errors["weights"]))}


def compare(place: Place, held: Reference) -> Finding:
    """How the runs of a place, which ended well, compare with the reference's."""
    own, other = held.folder / place.name, held.folder / WHOLE.name
    errors: dict[str, float] = dict.fromkeys(QUANTITIES, 0.0)
    first = ""

    def see(quantity: str, error: float, where: str) -> None:
        nonlocal first
        errors[quantity] = max(errors[quantity], error)
        allowed = held.tolerance[quantity]
        if error > allowed and not first:
            first = f"{quantity} {where}: off by {error:.1e}, and {allowed:.0e} is explained by rounding"

    def see_tensors(quantity: str, found: Iterable[Apart], where: str) -> None:
        for each in found:
            see(quantity, each.error, f"{where} of {each.name}")

    # In the order in which a fault shows: the loss, its gradient, the norm of it, the update.
    mine, its = _curves(own / "steps"), _curves(other / "steps")
    norm = _relative(mine[1][1], its[1][1])
    see("loss", _relative(mine[1][0], its[1][0]), "at step 1")
    found = apart(read_state(own / "gradient", 1), read_state(other / "gradient", 1), held.start, "parameter")
    see_tensors("gradient", (e for e in found if e.name not in held.rounding), "before clipping, at step 1,")
    adrift = 0.0
    for step in range(1, held.steps + 1):
        see("loss", _relative(mine[step][0], its[step][0]), f"at step {step}")
        see("grad norm", _relative(mine[step][1], its[step][1]), f"at step {step}")
        arm, whole = read_state(own / "steps", step), read_state(other / "steps", step)
        found = apart(arm, whole, held.start, "parameter")
        see_tensors("weights", (e for e in found if e.name not in held.rounding), f"after step {step}")
        # The running mean of a BatchNorm follows the bias before it.
        adrift = max(adrift, sum(e.difference**2 for e in found if e.name in held.rounding) ** 0.5)
        buffers = (e for e in apart(arm, whole, None, "buffer") if e.difference > adrift or e.difference == 0.0)
        see_tensors("buffers", buffers, f"after step {step}")
    return Finding(place=place, errors=errors, first=first, norm=norm)


def draws(held: Reference) -> bool:
    """Whether training draws random numbers beside those of the data: the reference's streams move in a step."""
    folder = held.folder / WHOLE.name / "steps"
    first, last = (_streams(read_state(folder, step)) for step in (1, held.steps))
    return first != last


def _streams(state: State) -> list[list[int]]:
    found = []
    for key, entry in state.source.entries.items():
        if key[0] == "rng":
            stream = torch.empty(entry.numel, dtype=torch.uint8)
            state.source.read(key, 0, stream)
            found.append(stream.tolist())
    return found


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


def cause(finding: Finding, again: Finding, recut: Finding, *, norms: bool, draws: bool, precision: str) -> str:
    """The likeliest reason for a difference, by a list of rules.

    Args:
        finding: of a place that does not agree.
        again: of the reference, run again.
        recut: of the reference, its windows cut otherwise.
        norms: the model has BatchNorm layers whose statistics are of a micro-batch.
        draws: training draws random numbers.
        precision: of the recipe.
    """
    if not again.agrees:
        return (
            "the reference differs from itself when run again: something in the model or the data is not deterministic"
        )
    if draws:
        return (
            "random numbers that training draws, as dropout does: ranks draw others than one process; check without "
            "them"
        )
    if recut.first:
        alone = f"; one process alone differs too when it cuts windows otherwise ({recut.first.partition(':')[0]})"
        if norms:
            return (
                "BatchNorm statistics: each micro-batch of each rank is normalised by its own; "
                f"normalization.policy=exact is the large batch{alone}"
            )
        return f"the model sees how a window is cut, as a statistic of a batch or a count of forwards does{alone}"
    first = finding.first
    if first.startswith("loss at step 1"):
        return "the forward: the ranks see other items, or the loss is divided otherwise; look at the data and the loss"
    if first.startswith("gradient"):
        if finding.norm <= TOLERANCES["fp32" if precision == "fp32" else "bf16"]["grad norm"]:
            return (
                "the update, as gradient norms agree: the learning rate that is applied, or a parameter whose gradient "
                "is not what the norm is of"
            )
        return "the backward: a parameter that the backend reduces or scales otherwise, or an output it does not follow"
    if first.startswith("grad norm"):
        return "the norm of the gradient: it is not added up over what all ranks hold"
    if first.startswith("weights"):
        return "the update: clipping, weight decay, or an optimizer whose update of a parameter needs the whole tensor"
    if precision != "fp32":
        return f"precision {precision}: rounding of a reduced precision; check with train.precision=fp32"
    if first.startswith("buffers"):
        return "a buffer that follows what a rank sees, as BatchNorm's statistics do: ranks see part of a window each"
    return "unknown: gradients agree and later steps do not; look for state in the model that no checkpoint holds"


def table(references: Sequence[Finding], findings: Sequence[Finding], causes: dict[str, str], held: Reference) -> str:
    """What was found, for a terminal of 100 columns."""
    rows = [*references, *findings]
    width = max(len(each.place.name) for each in rows)
    lines = [f"{'':{width}}  " + "".join(f"{quantity:>11}" for quantity in QUANTITIES)]
    for each in rows:
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
    if held.rounding:
        shown = ", ".join(held.rounding[:5]) + (f" and {len(held.rounding) - 5} more" * (len(held.rounding) > 5))
        lines.append(f"not compared, as their gradients are 0 but for rounding: {shown}")
    return "\n".join(lines)
