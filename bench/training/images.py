"""The images of convergence.py: handwritten digits that ship with scikit-learn, made harder.

Each of the 1,797 images of 8x8 is laid on a canvas of 12x12, turned, scaled and shifted, and noise
is added; what is trained on is drawn anew for each batch, what is validated on once for all. Every
rank has a quarter of the training images, all classes in each.

Invariants: a batch follows from seed, rank and its number alone, and every method sees the same
ones; no view of a held-out image is trained on.
"""

from __future__ import annotations

import functools
import hashlib
import math

import torch
from torch.nn import functional

from ringcomm.train.data import stratified_split

CANVAS, CLASSES = 12, 10
TURN, SCALE, SHIFT, NOISE = math.radians(15), 0.1, 0.25, 0.2
VIEWS = 2  # of each image that is held out


class Digits:
    """The images [n, 1, 8, 8] in units of their deviation, and int64 labels [n], in two parts.

    Attributes:
        digest: of the images and labels as they ship.
    """

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        self.digest = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()[:12]
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.training, self.held_out = stratified_split(self.labels)
        self.images = images / images[self.training].std()

    def views(
        self, numbers: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One view [n, 1, CANVAS, CANVAS] of each image of those numbers, and its label."""

        def drawn() -> torch.Tensor:
            return 2 * torch.rand(len(numbers), generator=generator) - 1

        angle, zoom = TURN * drawn(), CANVAS / 8 * torch.exp(SCALE * drawn())
        cosine, sine = zoom * torch.cos(angle), zoom * torch.sin(angle)
        rows = [cosine, -sine, SHIFT * drawn(), sine, cosine, SHIFT * drawn()]
        places = functional.affine_grid(
            torch.stack(rows, 1).view(-1, 2, 3),
            [len(numbers), 1, CANVAS, CANVAS],
            align_corners=False,
        )
        views = functional.grid_sample(self.images[numbers], places, align_corners=False)
        noise = torch.randn(views.shape, generator=generator)
        return views + NOISE * noise, self.labels[numbers]

    def validation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """VIEWS views of each image that is held out."""
        return self.views(self.held_out.repeat(VIEWS), torch.Generator().manual_seed(0))


@functools.cache
def digits() -> Digits:
    """All of them."""
    return Digits()


class ImageBatches:
    """The batches of one of ``ranks`` ranks, drawn anew for each seed."""

    def __init__(self, batch: int, seed: int, rank: int, ranks: int) -> None:
        self._batch, self._shard = batch, digits().training[rank::ranks]
        self._generator = torch.Generator().manual_seed(1000 * seed + rank)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [batch, 1, CANVAS, CANVAS], and their classes."""
        drawn = torch.randint(0, len(self._shard), (self._batch,), generator=self._generator)
        return digits().views(self._shard[drawn], self._generator)
