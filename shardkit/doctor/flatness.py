"""Memory flatness: the peak of one window at accumulation 1, 2, 4, 8, which must stay the same."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from typing import Literal

from shardkit.doctor.subject import Subject, open_copy
from shardkit.errors import RequestError, WindowError
from shardkit.memory import PeakBytes
from shardkit.recipe.schema import Normalization
from shardkit.window import train_step

ACCUMULATIONS = (1, 2, 4, 8)
FLAT = 1.10
# The peak at accumulation 8 against that at 2; from 2 on, the gradients of earlier micro-batches are there.


@dataclass(frozen=True, kw_only=True)
class Flatness:
    """The peaks of one policy."""

    policy: str
    peak_bytes: dict[int, int]
    # Accumulation -> bytes above the model and the batches, where the policy runs.
    failure: str | None = None
    # Why it does not run elsewhere, as where the window has one value a channel.

    @property
    def growth(self) -> float | None:
        """The last peak as a multiple of that at accumulation 2; None where one is missing."""
        first, last = (self.peak_bytes.get(ACCUMULATIONS[index]) for index in (1, -1))
        return None if first is None or last is None else last / max(first, 1)

    @property
    def verdict(self) -> Literal["flat", "grows", "fails"]:
        growth = self.growth
        if growth is None:
            return "fails"
        return "flat" if growth <= FLAT else "grows"


def flatness(subject: Subject, normalization: Normalization, *, name: str) -> Flatness:
    """Run windows of the recipe's micro-batches, forward and backward, on copies of the model under a policy."""
    peaks, failure = {}, None
    for count in ACCUMULATIONS:
        try:
            peaks[count] = _peak(subject, normalization, count)
        except (RequestError, WindowError, ValueError) as error:
            failure = failure or str(error)
    return Flatness(policy=name, peak_bytes=peaks, failure=failure)


def _peak(subject: Subject, normalization: Normalization, accumulation: int) -> int:
    engine = open_copy(subject, normalization, accumulation)
    # The logical batch again and again, where it is shorter than the window.
    window = list(itertools.islice(itertools.cycle(subject.ranks[0] or subject.micro_batches()), accumulation))
    with PeakBytes(subject.device) as used:
        train_step(engine, window, subject.loss, with_loss=False)
    engine.close()
    peak = used.peak
    del engine, used
    if subject.device.type == "cuda":
        # The allocator counts all there is: cycles must not live on into the next measurement.
        gc.collect()
    return peak
