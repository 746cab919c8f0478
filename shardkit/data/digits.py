"""The 1797 handwritten digits that come with scikit-learn, so that a recipe needs no download."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from shardkit.errors import RequestError

_NUM_TRAIN = 1437
_MEAN, _STD = 0.305, 0.376  # of the pixels, on a scale of 0 to 1


class Digits:
    """Items `(image, label)`: float32 `(1, size, size)` of mean 0 and deviation 1, and an int64 number.

    1437 digits to train on and 360 to evaluate on, by a fixed permutation.
    """

    def __init__(self, split: Literal["train", "eval"], size: int = 8, augment: bool = False) -> None:
        """Read all images into memory.

        Args:
            split: which part.
            size: pixels a side; other than 8 = resampled.
            augment: shift each image by up to an eighth of its side, at random, each time it is read.

        Raises:
            RequestError: scikit-learn is not installed, or there is no such split.
        """
        if split not in ("train", "eval"):
            raise RequestError(f"Digits has no split {split!r}; expected train or eval")
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise RequestError(
                "the data set Digits needs scikit-learn, which is not installed. pip install 'shardkit[examples]'"
            ) from error
        images, labels = load_digits(return_X_y=True)
        order = np.random.RandomState(0).permutation(len(labels))
        chosen = order[:_NUM_TRAIN] if split == "train" else order[_NUM_TRAIN:]
        pixels = torch.tensor(images[chosen] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        if size != 8:
            pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
        self.images = (pixels - _MEAN) / _STD
        self.labels = torch.tensor(labels[chosen], dtype=torch.int64)
        self._shift = max(size // 8, 1) if augment else 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self._shift:
            down, right = torch.randint(2 * self._shift + 1, (2,)).tolist()
            size = image.shape[-1]
            padded = F.pad(image, [self._shift] * 4, value=-_MEAN / _STD)
            image = padded[:, down : down + size, right : right + size]
        return image, self.labels[index]
