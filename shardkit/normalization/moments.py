"""Moments of a batch that is spread over ranks and micro-batches: (count, mean, M2), merged without E[x^2] - mean^2.

Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moments:
    """Of each channel: how many values, their mean, and the sum of squared distances from it.

    `count` is 0-dim, `mean` and `m2` are (C,); all fp64 once merged, so that counts are exact to 2^53.
    """

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Moments:
        """Of (N, C, ...); zero for an empty batch. Computed in fp32, or fp64 for fp64 input; returned in fp64."""
        dims = [d for d in range(x.dim()) if d != 1]
        channels = x.shape[1]
        count = x.numel() // channels if channels else 0
        if count == 0:
            return cls.none(channels, x.device)
        wide = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(wide, dims, correction=0)
        counts = torch.full((), float(count), dtype=torch.float64, device=x.device)
        return cls(counts, mean.double(), variance.double() * count)

    @classmethod
    def none(cls, channels: int, device: torch.device) -> Moments:
        """Of an empty batch: zeros."""
        zeros = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=device)
        return cls(zeros[0], zeros[1 : 1 + channels], zeros[1 + channels :])

    @classmethod
    def merge(cls, parts: torch.Tensor) -> Moments:
        """Of rows (count, mean..., m2...), shape (R, 1 + 2 C), as `packed` makes them; rows of count 0 do not matter.

        With n = sum n_r and mean = sum n_r mean_r / n: M2 = sum M2_r + sum n_r (mean_r - mean)^2, Chan's pairwise
        update taken over all parts at once.
        """
        counts, channels = parts[:, :1], (parts.shape[1] - 1) // 2
        means, m2s = parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
        count = counts.sum()
        mean = (counts * means).sum(0) / count.clamp(min=1)
        m2 = m2s.sum(0) + (counts * (means - mean).square()).sum(0)
        return cls(count, mean, m2)

    def packed(self) -> torch.Tensor:
        """(1 + 2 C,) in fp64: one tensor for one collective."""
        return torch.cat([self.count.reshape(1), self.mean, self.m2])

    def or_else(self, other: Moments) -> Moments:
        """These, or `other` where they are of an empty batch; does not read the device."""
        pick = torch.where(self.count > 0, self.packed(), other.packed())
        channels = len(self.mean)
        return Moments(pick[0], pick[1 : 1 + channels], pick[1 + channels :])

    def variance(self) -> torch.Tensor:
        """The biased variance, which normalises."""
        return self.m2 / self.count.clamp(min=1)

    def unbiased_variance(self) -> torch.Tensor:
        """What running statistics keep, as torch does."""
        return self.m2 / (self.count - 1).clamp(min=1)
