"""How far two equal runs may be apart at a step: from the rounding of the dtype, the step, and what was measured.

Two equal runs add the same numbers in another order. At the first step that is a few units in the last place of the
compute dtype (Higham, Accuracy and Stability of Numerical Algorithms, 4.2: a pairwise sum of n terms is off by at most
eps * log2(n)). Training then amplifies it, and how much is a matter of the model: over 100 steps in fp32 the losses of
a smooth decoder stay within 1e-6, while those of a ReLU network with BatchNorm and lr 0.1 go apart when one activation
crosses zero in one of the runs: 1e-4 in the gradient norm from one step to the next, 1e-3 in the loss ten steps later,
1e-1 fifty steps later. A nudge of every weight by one unit in the last place does the same. So the bound is a law of
the step t, relative to the value:

    allowed(t) = max(first * t ** growth, noise(t))

tight in the first steps, where faults show, and wide enough for such a model later. Where a setting that changes the
maths is known to differ (a weight decay, a clipping norm), what a flipped activation might explain is better explained
by that, and the bound is the narrow one: what rounding does as long as nothing flips. `noise` is `margin` times the
smallest power law above what the reference was measured to differ from itself; it can only widen the bound, because a
backend that is equal to itself to the last bit shows nothing of how the model amplifies. Above `most` a difference
proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Noise that adds up at random, that adds up, and that takes off.
POWERS = (0.5, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Law:
    """A relative difference that grows with the step, counted from 1."""

    first: float
    growth: float

    def at(self, step: int) -> float:
        return self.first * step**self.growth


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The relative differences that rounding explains."""

    dtype: str
    loss: Law
    grad_norm: Law
    most: float
    # Above it a difference is no evidence: any two runs may be that far apart.
    margin: float = 10.0
    # What was measured once is not the largest there is.
    evaluation: Law | None = None
    # Of the loss of an evaluation; None = that of training.

    def allowed(self, curve: str, steps: Sequence[int], noise: Mapping[int, float] | None) -> list[float]:
        """The bound of a curve (loss, grad_norm or eval_loss) at each step.

        Args:
            curve: which one.
            steps: from 1.
            noise: measured differences by step, if any.
        """
        law = {"grad_norm": self.grad_norm, "eval_loss": self.evaluation or self.loss}.get(curve, self.loss)
        noisy = _envelopes(noise or {}, self.margin)
        return [max(law.at(step), min((each.at(step) for each in noisy), default=0.0)) for step in steps]


def _envelopes(noise: Mapping[int, float], margin: float) -> list[Law]:
    """For each power the smallest law above `margin` times the noise."""
    measured = {step: value for step, value in noise.items() if value > 0}
    if not measured:
        return []
    return [
        Law(first=margin * max(value / step**power for step, value in measured.items()), growth=power)
        for power in POWERS
    ]


# fp32: eps 1.2e-7; at step 1 seven backends differ by at most 3e-8 (loss) and 3e-7 (gradient norm). An activation that
# flipped at step 7 made 1e-4 (gradient norm) of it there, 4e-4 and 1e-2 at step 15, 6e-3 and 4e-2 at step 30.
# Running statistics carry a flip on: with policy sync on digits-resnet, ddp against zero3, an evaluation after step 29
# differs by 4.9e-2 and 0.8e-2 (two seeds) where the training loss differs by 0.4e-2 and 0.2e-2: at most 0.19 of this.
FP32 = Tolerance(
    dtype="fp32",
    loss=Law(first=2e-6, growth=3),
    grad_norm=Law(first=2e-5, growth=4),
    evaluation=Law(first=2e-6, growth=3.5),
    most=1e-1,
)
# On the same backend and ranks a setting that changes nothing leaves every bit as it is (20 of 20 runs): what differs
# is what the setting does. In fp32 1e-7 and 1e-6 up to step 10 where sums are only ordered otherwise.
FP32_NARROW = Tolerance(dtype="fp32", loss=Law(first=3e-7, growth=1), grad_norm=Law(first=3e-6, growth=1), most=1e-1)
# bf16: eps 7.8e-3, averaged over a batch: 2e-5 and 1e-4 at step 1, 2e-3 and 3e-2 at step 20 between ddp and fsdp2.
BF16 = Tolerance(dtype="bf16", loss=Law(first=3e-4, growth=1.5), grad_norm=Law(first=1e-2, growth=1.5), most=2e-1)
BF16_NARROW = Tolerance(dtype="bf16", loss=Law(first=3e-6, growth=1), grad_norm=Law(first=3e-5, growth=1), most=2e-1)
# fp16: eps 9.8e-4, an eighth of bf16's; not measured.
FP16 = Tolerance(dtype="fp16", loss=Law(first=4e-5, growth=2), grad_norm=Law(first=1e-3, growth=2), most=1e-1)
FP16_NARROW = Tolerance(dtype="fp16", loss=Law(first=3e-6, growth=1), grad_norm=Law(first=3e-5, growth=1), most=1e-1)
_OF_PRECISION = {
    "fp32": (FP32, FP32_NARROW),
    "bf16-mixed": (BF16, BF16_NARROW),
    "bf16-true": (BF16, BF16_NARROW),
    "fp16-mixed": (FP16, FP16_NARROW),
}


def finest(precisions: Sequence[str], *, narrow: bool = False) -> Tolerance:
    """The tolerance of the finest compute dtype: that the other run rounds to less is a difference of the two.

    Args:
        precisions: of both runs.
        narrow: a setting that changes the maths differs, and nothing that orders sums otherwise.
    """
    found = [_OF_PRECISION.get(name, (FP32, FP32_NARROW))[narrow] for name in precisions]
    return min(found, key=lambda each: each.loss.first)
