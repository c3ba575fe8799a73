"""The gate before the clock: a kernel's result on samples against the reference, bit for bit. What is wrong gets no time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from experiments.harness.outcome import Wrong
from experiments.kernels.cases.case import Case, Compared, Inputs, Sample
from experiments.kernels.cases.floors import Shape
from reference import SCHEMES

#: Rows that are compared at either end of a tensor, if its blocks span one row each.
ROWS = 32


def samples(case: Case, shape: Shape) -> list[Sample]:
    """The first and the last rows (columns, where blocks run along the first axis); whole blocks of rows."""
    scheme = SCHEMES.get(case.scheme)
    block = scheme.scale.block if scheme else 1
    rows = max(ROWS, block[0]) if isinstance(block, tuple) else ROWS
    length = shape[1] if case.options.get("axis") == 0 else shape[0]
    if length <= rows:
        return [Sample(0, length)]
    if case.operation == "both":
        length = min(shape)
    last = Sample(length - rows, length)
    return [Sample(0, rows), last]


def check(case: Case, fast: Any, inputs: Inputs, shape: Shape) -> int:
    """How many elements were compared; Wrong with the first difference."""
    result = case.call(fast, inputs)
    count = 0
    for sample in samples(case, shape):
        for compared in case.compare(fast, inputs, result, sample):
            count += same(compared)
    if not count:
        raise Wrong("nothing was compared")
    return count


def same(compared: Compared) -> int:
    """How many elements are equal as bits; Wrong where one is not, or where shapes or widths differ."""
    what, got, expected = compared
    if got is None and expected is None:
        return 0
    if got is None or expected is None:
        raise Wrong(f"{what}: got {'nothing' if got is None else 'some'}, the reference has the opposite")
    mine, right = raw(got), raw(expected)
    if mine.shape != right.shape or mine.dtype != right.dtype:
        raise Wrong(
            f"{what}: {mine.dtype}{list(mine.shape)}, the reference has {right.dtype}{list(right.shape)}"
        )
    wrong = np.flatnonzero(mine != right)
    if wrong.size:
        index = int(wrong[0])
        raise Wrong(
            f"{what}: {wrong.size} of {mine.size} differ, first at {index}: {mine.flat[index]:#x}, the reference has "
            f"{right.flat[index]:#x}"
        )
    return int(mine.size)


def raw(value: Any) -> np.ndarray:
    """Bit patterns as unsigned integers, on the host."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[host.element_size()]
        array = host.view(carrier).numpy()
    else:
        array = np.ascontiguousarray(value)
    return array.view(f"u{array.dtype.itemsize}")
