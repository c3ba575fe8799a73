"""Weights of `linear_sparse_int4` whose products are exact in float32 in any order, and random ones, for NumPy and torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

#: Indices of the six pairs of a group.
PAIRS = tuple(i | j << 2 for i in range(4) for j in range(i + 1, 4))
#: Rows of inputs, rows and columns of the weight, columns of a scale.
EXACT = (
    (1, 64, 512, 128), (1, 37, 4096, 128), (2, 16, 1024, 64), (3, 5, 256, 32), (4, 100, 352, 32), (8, 48, 14336, 256),
    (5, 33, 192, 64), (16, 80, 640, 128), (17, 64, 256, 64), (33, 47, 512, 32), (64, 96, 1024, 128), (65, 32, 256, 128),
    (1, 4112, 1024, 128), (16, 1001, 256, 128),
)  # fmt: skip
FLOATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


class Case(NamedTuple):
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
) -> Case:
    """All sixteen codes, scales that are powers of two, small integers as inputs and bias: NumPy arrays."""
    rng = np.random.default_rng(seed)
    scale = rng.choice(np.array([0.5, 1, 2]), (rows, length // group))
    x, bias = (rng.integers(-2, 3, shape) for shape in ((count, length), (rows,)))
    return Case(
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
) -> Case:
    """Normal inputs, all codes, scales that differ by powers of two."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 2, (rows, length // group)) * 2.0 ** rng.integers(-9, 4, (rows, 1))
    given = exact_case(count, rows, length, group, dtype, storage, seed)
    x, bias = (rng.standard_normal(part.shape).astype(FLOATS[dtype]) for part in (given.x, given.bias))
    return given._replace(x=x, bias=bias, scale=scale.astype(FLOATS[storage]))


def zero_points(case: Case, seed: int = 0) -> npt.NDArray[np.int8]:
    """All sixteen, one a scale."""
    return np.random.default_rng(seed).integers(-8, 8, case.scale.shape, np.int8)


def as_tensors(case: Case) -> Case:
    """The same as torch tensors on the CPU."""
    return Case(*(_tensor(part) for part in case))


def _tensor(part: Any) -> torch.Tensor:
    if part.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(part.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(part)
