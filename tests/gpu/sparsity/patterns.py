"""Inputs of 2:4 that are hard: ties, every NaN, both zeros, subnormals, infinities, and masks of few.

Weights and masks that a compressed layout has to keep: random bits, NaN and infinities too, zero to two of four kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: By octets, by counting in groups of every size with every digit of N, all of a group, and element by element.
PATTERNS = ("2:4", "1:4", "3:4", "4:4", "1:8", "4:8", "7:8", "5:16", "8:16", "16:16", "1:1", "2:5")
#: Programs that are filled and that are not, one octet, several axes, rows that five divides.
SHAPES = ((8, 2048), (3, 520), (1, 8), (2, 3, 16), (2, 80))


def generator(seed: int) -> torch.Generator:
    """Random numbers that do not depend on others."""
    return torch.Generator().manual_seed(seed)


def patterns(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A third random bit patterns, a third from eight patterns with ties, and normal numbers."""
    size = dtype.itemsize
    whole = getattr(torch, f"int{8 * size}")
    low, high = torch.iinfo(whole).min, torch.iinfo(whole).max
    bits = torch.randint(low, high + 1, shape, generator=generator(1), dtype=torch.int64)
    # By themselves, so that tensors of no elements have them too.
    few = torch.randint(low, high + 1, (8,), generator=generator(6), dtype=torch.int64)
    few[:4] = torch.tensor([0, low, high, low + 1])
    tied = few[torch.randint(0, 8, shape, generator=generator(2))]
    normal = (torch.randn(shape, generator=generator(3)) * (1 if dtype.is_floating_point else 40)).clamp(
        -100, 100
    )
    if dtype == torch.uint8:
        normal = normal.abs()
    chosen = torch.randint(0, 3, (*shape[:-1], shape[-1] // 4), generator=generator(4)).repeat_interleave(
        4, -1
    )
    made = torch.where(chosen == 0, bits, tied).to(whole)
    return torch.where(chosen == 2, normal.to(dtype).view(whole), made).view(dtype)


def few_of_four(shape: tuple[int, ...]) -> torch.Tensor:
    """A mask with none, one or two elements of each group, every such choice."""
    choices = torch.tensor(
        [[i >> j & 1 for j in range(4)] for i in range(16) if i.bit_count() <= 2], dtype=torch.bool
    )
    groups = (*shape[:-1], shape[-1] // 4)
    return choices[torch.randint(0, len(choices), groups, generator=generator(5))].reshape(shape)


#: Whole blocks and panels, one of each, and lengths that padding fills up in one direction or both.
MASKED_SHAPES = ((128, 128), (64, 128), (16, 16), (80, 144), (192, 48), (8, 264))


def masked_weights(
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
