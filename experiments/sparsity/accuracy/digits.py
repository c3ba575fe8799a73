"""Images: collages of four handwritten digits, moved, faint and under noise, made of real ones.

The digits are the 1797 images (8 x 8 pixels, 0 to 16) of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits"
(UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0), in the file that scikit-learn has as
`sklearn/datasets/data/digits.csv.gz`. The file is in this folder: 57 kB, where scikit-learn and what it needs would be 45 MB to
install for it, and a GPU without a network would have none. Digits of training and of evaluation are other images.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_name("digits.csv.gz")
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
#: Pixels of a digit's side, digits of a collage's side, and the classes of a digit.
SIDE, GRID, CLASSES = 8, 2, 10
#: The largest value of a pixel.
INK = 16.0
#: The last images of the file, whose writers are mostly others, are those of evaluation.
HELD_OUT = 450


@dataclass(frozen=True)
class Collages:
    """How hard the task is.

    cell: pixels of the square in which a digit lies anywhere. noise: the deviation of what is added to every pixel, where ink
    is 1. faintest: the least that a digit's ink is multiplied with.
    """

    cell: int = 10
    noise: float = 0.3
    faintest: float = 0.5

    @property
    def side(self) -> int:
        """Pixels of a collage's side."""
        return GRID * self.cell

    def draw(self, digits: Digits, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(count, 1, side, side) float32 with mean near 0, and the digits (count, 4) int64, rows first."""
        chosen = torch.randint(len(digits.labels), (count, GRID**2), generator=generator)
        room = self.cell - SIDE + 1
        down, right = torch.randint(room, (2, count, GRID**2), generator=generator)
        ink = self.faintest + (1 - self.faintest) * torch.rand(count, GRID**2, 1, 1, generator=generator)
        cells = torch.zeros(count, GRID**2, self.cell, self.cell)
        rows = torch.arange(SIDE)
        image, place = torch.arange(count)[:, None, None, None], torch.arange(GRID**2)[None, :, None, None]
        y = down[..., None, None] + rows[:, None]
        x = right[..., None, None] + rows[None, :]
        cells[image, place, y, x] = digits.images[chosen] * ink
        whole = (
            cells.unflatten(1, (GRID, GRID)).permute(0, 1, 3, 2, 4).reshape(count, 1, self.side, self.side)
        )
        whole += self.noise * torch.randn(whole.shape, generator=generator)
        return whole - whole.mean(), digits.labels[chosen]


@dataclass(frozen=True)
class Digits:
    """Single digits: images (count, 8, 8), float32, 0 to 1, and labels (count), int64."""

    images: Tensor
    labels: Tensor


@cache
def load() -> tuple[Digits, Digits]:
    """Digits of training and of evaluation. ValueError where the file is not the one that is named above."""
    data = FILE.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(
            f"{FILE.name} is not the file of 1797 digits that this task is of; restore it from the repository"
        )
    lines = gzip.decompress(data).decode().split()
    table = np.array([line.split(",") for line in lines], dtype=np.float32)
    images = torch.from_numpy(table[:, :-1].reshape(-1, SIDE, SIDE) / INK)
    labels = torch.from_numpy(table[:, -1]).long()
    first = len(labels) - HELD_OUT
    return Digits(images[:first], labels[:first]), Digits(images[first:], labels[first:])


__all__ = ["CLASSES", "GRID", "Collages", "Digits", "load"]
