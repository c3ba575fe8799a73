"""Weights and masks that a compressed layout has to keep: random bits, NaN and infinities too, zero to two of four kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Whole blocks and panels, one of each, and lengths that padding fills up in one direction or both.
SHAPES = ((128, 128), (64, 128), (16, 16), (80, 144), (192, 48), (8, 264))


def weights(
    shape: tuple[int, int], dtype: torch.dtype, turned: bool, device: str = "cpu", seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random bits with a mask of two of every four, and one of none to two, in rows (turned: in columns)."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype).to(device)
    rows, columns = reversed(shape) if turned else shape
    ranks = torch.rand(rows, columns // 4, 4, generator=generator).argsort(-1)
    counts = torch.randint(0, 3, (rows, columns // 4, 1), generator=generator)
    for kept in (torch.full_like(counts, 2), counts):
        mask = (ranks < kept).view(rows, columns)
        yield w, (mask.t() if turned else mask).contiguous().to(device)


__all__ = ["SHAPES", "weights"]
