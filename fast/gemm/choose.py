"""Which family multiplies: the one place that says it, of every kind of stored weight.

Each function gives the families that take a product on the weight's device, the quickest first and torch's last: who multiplies
takes the first, and the next one where it does not compile or load. What is measured to be quicker is data or a model beside
each kernel (`gains`, `is_faster`); their order stands here. `by_rows` says it for ranges of rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from fast.gemm.families import (
    SM90_INTN_SMALL_M,
    SM90_S8_GEMM,
    SM90_W4A16_GEMM,
    SM90_W4A16_GEMV,
    TORCH_DEQUANTIZE,
    TRITON_GEMM_SMALL_M,
    TRITON_GEMV_ANY,
    TRITON_GEMV_W4A16,
    TRITON_GEMV_W8A8,
    TRITON_GEMV_W8A16,
    TRITON_INT_SCALED_MM,
    TRITON_SCALED_MM,
    TRITON_SMALL_M,
    Family,
)
from reference import Quantized, Scheme

if TYPE_CHECKING:
    from fast.kernels.linear_small.layout import ArrangedWeight

#: Dtypes of inputs that kernels of preshuffled weights take.
INPUTS = (torch.bfloat16, torch.float16)
#: The most rows an expert, on average, that `triton_small_m` multiplies.
MOST_AVERAGE = 64
#: The same where `sm90_w4a16_gemm` takes the weights: of more it is faster (times: reports/LOG.md).
FEW_AVERAGE = 40
#: Elements of a weight from which two launches of `sm90_w4a16_gemv` are faster than one of both
#: (`reports/data/linear_small_pair_times.json`).
APART = 1 << 25
#: Elements of a weight from which those of 4 bits are again faster in one launch, but for ALWAYS_APART rows or fewer, and those
#: of 8 bits are faster apart by `triton_small_m` too.
LARGE = 1 << 27
#: Rows up to which weights of 4 bits from APART elements on are always faster apart.
ALWAYS_APART = 2


def preshuffled(w: ArrangedWeight, rows: int, inputs: torch.dtype) -> Iterator[Family]:
    """Of rows of a dtype by a preshuffled weight (N, K)."""
    from fast.kernels.linear_small import host as small_m
    from fast.kernels.sm90_w4a16_gemv import host as gemv

    gemm = _gemm_takes(w, rows, inputs)
    first = gemm and gemm_is_faster(w, rows)
    if first:
        yield SM90_W4A16_GEMM
    if inputs in INPUTS and 0 < rows <= small_m.MOST_ROWS:
        if gemv.is_faster(w, rows, inputs, inputs):
            yield SM90_W4A16_GEMV
        yield TRITON_SMALL_M
    if gemm and not first:
        yield SM90_W4A16_GEMM
    yield TORCH_DEQUANTIZE


def _gemm_takes(w: ArrangedWeight, rows: int, inputs: torch.dtype) -> bool:
    """Whether `sm90_w4a16_gemm` multiplies so many rows."""
    from fast.kernels.sm90_w4a16_gemm import host as gemm

    if not 0 < rows <= gemm.MOST_ROWS or gemm.refused_rows(rows, w) is not None:
        return False
    return gemm.refused_weight(w, inputs, w.words.device) is None


def gemm_is_faster(w: ArrangedWeight, rows: int) -> bool:
    """Whether `sm90_w4a16_gemm`, which takes such rows, is faster than `triton_small_m`, which takes up to 128."""
    from fast.gemm.small_m_or_gemm import LEAST, MOST, gains
    from fast.kernels.sm90_w4a16_gemm import host as gemm

    if not LEAST <= rows <= MOST:
        return False
    return gains(rows, *w.shape, gemm.weight_of(w), gemm.processors_of(w.words.get_device()))


def pair_is_faster(w: ArrangedWeight, rows: int, inputs: torch.dtype) -> bool:
    """Whether two weights like this are multiplied faster in one launch, of rows that it takes, than by one each."""
    from fast.kernels.linear_small.tilings import BITS
    from fast.kernels.sm90_w4a16_gemv import host as gemv

    size, bits = w.shape[0] * w.shape[1], BITS[w.element]
    if size < APART or (size >= LARGE and bits == 4 and rows > ALWAYS_APART):
        return True
    if size >= LARGE and bits == 8:
        return not gemv.is_taken(w, 1, inputs, inputs)
    return not gemv.is_faster(w, rows, inputs, inputs)


def experts(w: ArrangedWeight, average: float, inputs: torch.dtype) -> Iterator[Family]:
    """Of rows sorted by expert, so many of each on average, by preshuffled weights (E, N, K)."""
    from fast.kernels.sm90_w4a16_gemm import host as gemm

    if inputs in INPUTS:
        if average > FEW_AVERAGE and gemm.refused_weight(w, inputs, w.words.device) is None:
            yield SM90_W4A16_GEMM
        if average <= MOST_AVERAGE:
            yield TRITON_SMALL_M
    yield TORCH_DEQUANTIZE


def stored(w: Quantized, rows: int, inputs: torch.dtype) -> Iterator[Family]:
    """Of rows of a dtype by a weight (N, K) in the plain layout, on a GPU of `device.OLDEST` or later."""
    if importlib.util.find_spec("triton") is not None and (family := _plain(w, rows, inputs)) is not None:
        yield family
    yield TORCH_DEQUANTIZE


def _plain(w: Quantized, rows: int, inputs: torch.dtype) -> Family | None:
    from fast.kernels.linear import select
    from fast.launch.cuda import CudaLaunch

    launch = select.launch_for(w, rows, inputs)
    if launch is None:
        return None
    if isinstance(launch, CudaLaunch):
        return SM90_INTN_SMALL_M
    return {
        select.gemv_w4a16_kernel: TRITON_GEMV_W4A16,
        select.gemv_w8a16_kernel: TRITON_GEMV_W8A16,
        select.gemv_any_kernel: TRITON_GEMV_ANY,
    }.get(launch.kernel, TRITON_GEMM_SMALL_M)


def codes(
    x: Scheme, w: Scheme, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Family]:
    """Of rows of 8-bit codes by the codes of a weight, shape (N, K), into a dtype: kernels alone; none for lengths of none."""
    from fast.kernels.sm90_s8_gemm import host as s8_gemm

    if rows == 1:
        yield TRITON_GEMV_W8A8
    elif x.element == "int8":
        if x.zero is None and s8_gemm.is_faster(rows, shape, dtype, device):
            yield SM90_S8_GEMM
        yield TRITON_INT_SCALED_MM
    else:
        yield TRITON_SCALED_MM


class Range(NamedTuple):
    """Rows from `first` to `last`, None for all that follow, and the name of the family that multiplies them."""

    first: int
    last: int | None
    name: str

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} rows and more {self.name}" if self.first > 1 else self.name
        if self.first == self.last:
            return f"{self.first} row{'s' * (self.first > 1)} {self.name}"
        return f"{self.first}-{self.last} rows {self.name}"


def by_rows(name_of: Callable[[int], str], most: int) -> tuple[Range, ...]:
    """The ranges of rows from 1 to `most` that have one name: asked for at powers of two, and in between until each bound is
    known. A name that begins and ends between two powers of two is not seen; the last range stands for all that follow."""
    found: list[Range] = []
    known = [(rows, name_of(rows)) for rows in (*_powers(most), most)]
    first = 1
    for (below, name), (above, other) in pairwise(known):
        if name != other:
            last = _last(name_of, below, above, name)
            found.append(Range(first, last, name))
            first = last + 1
    return (*found, Range(first, None, known[-1][1]))


def _powers(most: int) -> Iterator[int]:
    """Powers of two below."""
    power = 1
    while power < most:
        yield power
        power *= 2


def _last(name_of: Callable[[int], str], below: int, above: int, name: str) -> int:
    """The last number of rows that has a name, between one that has it and one that does not."""
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if name_of(middle) == name else (below, middle)
    return below


__all__ = [
    "INPUTS",
    "MOST_AVERAGE",
    "Range",
    "by_rows",
    "codes",
    "experts",
    "gemm_is_faster",
    "pair_is_faster",
    "preshuffled",
    "stored",
]
