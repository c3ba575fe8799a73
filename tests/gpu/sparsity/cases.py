"""Weights of 2:4 made in their compressed form, and inputs, on a GPU, without any kernel of ours.

Inputs of 2:4 that are hard: ties, every NaN, both zeros, subnormals, infinities, and masks of few.

Weights and masks that a compressed layout has to keep: random bits, NaN and infinities too, zero to two of four kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

# The order in which `fast.kernels.layers.column_sums` adds, in NumPy, and its bound.

#: The six choices of two of four, as 4 bits.
CHOICES = (0b0100, 0b1000, 0b1001, 0b1100, 0b1101, 0b1110)


@dataclass
class Case:
    """x (M, K), the weight compressed and dense, metadata arranged, scales and a bias."""

    x: torch.Tensor
    values: torch.Tensor
    metadata: torch.Tensor
    arranged: torch.Tensor
    dense: torch.Tensor
    x_scale: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor


def elements(shape: tuple[int, ...], dtype: torch.dtype, whole: bool, device: str) -> torch.Tensor:
    """Integers from -2 to 2, or normal numbers (of int8 all)."""
    if dtype == torch.int8 and not whole:
        return torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
    made = torch.randint(-2, 3, shape, device=device).float() if whole else torch.randn(shape, device=device)
    return made.to(dtype)


def case(
    m: int, n: int, k: int, dtypes: tuple[torch.dtype, torch.dtype], *, whole: bool, device: str = "cuda", dense: bool = True
) -> Case:  # fmt: skip
    """dtypes: of values and x. whole: integers, and scales with few bits, so that every sum and product is exact."""
    from fast.sparsity.linear_sparse import arrange_sparse_metadata

    choices = torch.tensor(CHOICES, device=device, dtype=torch.uint8)
    groups = choices[torch.randint(0, 6, (n, k // 4), device=device)]
    if groups.shape[1] % 2:
        groups = torch.cat([groups, groups.new_zeros(n, 1)], 1)
    metadata = groups[:, ::2] | groups[:, 1::2] << 4
    values = elements((n, k // 2), dtypes[0], whole, device)
    pair = values.view(torch.uint8 if values.itemsize == 1 else torch.int16).view(n, k // 4, 2)
    index = torch.stack([groups[:, : k // 4] & 3, groups[:, : k // 4] >> 2], -1).long()
    full = torch.zeros(n, k // 4, 4, dtype=pair.dtype, device=device).scatter_(2, index, pair)
    x_scale = torch.rand(m, 1, device=device) + 0.5
    scale = torch.rand(n, 1, device=device) + 0.5
    arranged = arrange_sparse_metadata(metadata, dtypes[0])
    return Case(
        elements((m, k), dtypes[1], whole, device), values, metadata, arranged,
        full.view(n, k).view(dtypes[0]) if dense else values, x_scale, scale, torch.randn(n, device=device),
    )  # fmt: skip


def wanted(one: Case, out: torch.dtype, scaled: bool) -> torch.Tensor:
    """The result where every sum is exact: the roundings of `reference.linear_sparse`, in float32."""
    sums = one.x.double() @ one.dense.double().T
    if out == torch.int32:
        return sums.to(torch.int32)
    total = sums.float()
    if scaled:
        total = (total * one.x_scale) * one.scale.T + one.bias
    return total.to(out)


Array = npt.NDArray[Any]
#: Rows of a step, which are added as a tree, and what float32 rounds a sum by.
STEP, UNIT = 8, 2.0**-24


def sum_model(g: Array, parts: int, chunk: int) -> Array:
    """Sums (N) in float32 of g (M, N), by chunks of rows in steps of STEP, then by pairs of neighbours."""
    rows, length = g.shape
    padded = np.zeros((parts * chunk, length), np.float32)
    padded[:rows] = g
    steps = tree(np.moveaxis(padded.reshape(parts, chunk // STEP, STEP, length), 2, 0))
    totals = np.zeros((parts, length), np.float32)
    for at in range(chunk // STEP):
        totals += steps[:, at]
    more = (1 << (parts - 1).bit_length()) - parts
    return tree(np.concatenate([totals, np.zeros((more, length), np.float32)]))


def tree(v: Array) -> Array:
    """Sums along the first axis, a power of two: neighbours first."""
    while len(v) > 1:
        v = v[::2] + v[1::2]
    return v[0]


def sum_bound(g: Array, parts: int, chunk: int) -> Array:
    """How far sums in float32 may be from exact ones: each of the additions on the longest way is off by UNIT of its result."""
    additions = (log2(STEP) + ceil(chunk / STEP) + ceil(log2(parts))) * UNIT
    most: Array = additions / (1 - additions) * np.abs(g.astype(np.float64)).sum(0)
    return most


#: By octets, by counting in groups of every size with every digit of N, all of a group, and element by element.
PATTERNS = ("2:4", "1:4", "3:4", "4:4", "1:8", "4:8", "7:8", "5:16", "8:16", "16:16", "1:1", "2:5")
#: Programs that are filled and that are not, one octet, several axes, rows that five divides.
PATTERN_SHAPES = ((8, 2048), (3, 520), (1, 8), (2, 3, 16), (2, 80))


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


# Weights of `linear_sparse_int4` whose products are exact in float32 in any order, and random ones, for NumPy and torch.

#: Indices of the six pairs of a group.
PAIRS = tuple(i | j << 2 for i in range(4) for j in range(i + 1, 4))
#: Rows of inputs, rows and columns of the weight, columns of a scale.
EXACT = (
    (1, 64, 512, 128), (1, 37, 4096, 128), (2, 16, 1024, 64), (3, 5, 256, 32), (4, 100, 352, 32), (8, 48, 14336, 256),
    (5, 33, 192, 64), (16, 80, 640, 128), (17, 64, 256, 64), (33, 47, 512, 32), (64, 96, 1024, 128), (65, 32, 256, 128),
    (1, 4112, 1024, 128), (16, 1001, 256, 128),
)  # fmt: skip
FLOATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


class Int4Case(NamedTuple):
    """Operands of a call, in its order."""

    x: Any
    codes: Any
    metadata: Any
    scale: Any
    bias: Any


def metadata_of(rng: np.random.Generator, rows: int, length: int) -> npt.NDArray[np.uint8]:
    """Every pair of indices in every place."""
    pairs = rng.choice(np.array(PAIRS, np.uint8), (rows, length // 4))
    return (pairs[:, 0::2] | pairs[:, 1::2] << np.uint8(4)).astype(np.uint8)


def exact_case(
    count: int,
    rows: int,
    length: int,
    group: int,
    dtype: str = "bfloat16",
    storage: str = "float32",
    seed: int = 0,
) -> Int4Case:
    """All sixteen codes, scales that are powers of two, small integers as inputs and bias: NumPy arrays."""
    rng = np.random.default_rng(seed)
    scale = rng.choice(np.array([0.5, 1, 2]), (rows, length // group))
    x, bias = (rng.integers(-2, 3, shape) for shape in ((count, length), (rows,)))
    return Int4Case(
        x.astype(FLOATS[dtype]), rng.integers(0, 256, (rows, length // 4), np.uint8), metadata_of(rng, rows, length),
        scale.astype(FLOATS[storage]), bias.astype(FLOATS[dtype]),
    )  # fmt: skip


def random_case(
    count: int,
    rows: int,
    length: int,
    group: int,
    dtype: str = "bfloat16",
    storage: str = "float32",
    seed: int = 0,
) -> Int4Case:
    """Normal inputs, all codes, scales that differ by powers of two."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 2, (rows, length // group)) * 2.0 ** rng.integers(-9, 4, (rows, 1))
    given = exact_case(count, rows, length, group, dtype, storage, seed)
    x, bias = (rng.standard_normal(part.shape).astype(FLOATS[dtype]) for part in (given.x, given.bias))
    return given._replace(x=x, bias=bias, scale=scale.astype(FLOATS[storage]))


def zero_points(case: Int4Case, seed: int = 0) -> npt.NDArray[np.int8]:
    """All sixteen, one a scale."""
    return np.random.default_rng(seed).integers(-8, 8, case.scale.shape, np.int8)


def as_tensors(case: Int4Case) -> Int4Case:
    """The same as torch tensors on the CPU."""
    return Int4Case(*(_tensor(part) for part in case))


def _tensor(part: Any) -> torch.Tensor:
    if part.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(part.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(part)
