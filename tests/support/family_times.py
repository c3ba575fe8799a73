"""Measured times of variants of kernel families: reports/gpu/family_times.csv.

The launch and the rows that `fast.gemm.choose` gives of a weight in the plain layout, on a GPU that is played or not.
"""

from __future__ import annotations

import csv
from pathlib import Path

from experiments.report.families import problem_of
from fast.gemm.choose import choose, rows_stored
from fast.gemm.families import FAMILIES, HOPPER, TORCH_DEQUANTIZE, Problem, of_stored

__all__ = ["FILE", "OTHERS", "Key", "measured", "problem"]


FILE = Path(__file__).resolve().parents[2] / "reports/gpu/family_times.csv"
#: What was timed beside variants: dense weights, in bfloat16 and dequantized for the call, and another family.
OTHERS = ("bf16", "dense", "linear_small")
Key = tuple[str, int, int, str, int]


def measured(family: str, device: str = "NVIDIA H200") -> dict[Key, dict[str, float]]:
    """Microseconds by scheme, n, k, rows (of experts those of each, or of all) and experts, then by variant."""
    found: dict[Key, dict[str, float]] = {}
    with FILE.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["family"], row["device"]) == (family, device):
                key = row["scheme"], int(row["n"]), int(row["k"]), row["rows"], int(row["experts"] or 0)
                found.setdefault(key, {})[row["variant"]] = float(row["us"])
    return found


def problem(family: str, key: Key) -> Problem:
    """As `choose` sees it."""
    scheme, n, k, rows, experts = key
    p = problem_of(FAMILIES[family].takes[0].layout, scheme, (n, k))
    return p._replace(rows=sum(map(int, rows.split())) / (experts or 1), experts=experts)


#: A Hopper GPU on which nothing compiles CUDA C++.
WITHOUT_NVRTC = HOPPER._replace(nvrtc=False)


def launch_for(w, rows, dtype, device=WITHOUT_NVRTC):
    """The launch of the first family that has one; None where torch multiplies."""
    from fast.kernels.triton_gemv import select

    for family in choose(of_stored(w, rows, dtype)._replace(device=device)):
        if family is not TORCH_DEQUANTIZE and (launch := select.launch_for(w, rows, dtype, family.name)):
            return launch
    return None


def rows_fused(w, dtype, device=WITHOUT_NVRTC):
    """The most rows that a kernel multiplies."""
    return rows_stored(of_stored(w, 1, dtype)._replace(device=device))


def linear(x, w, bias=None, device=WITHOUT_NVRTC):
    """`fast.linear` by the first family that takes the product; None where torch multiplies. device: None for the weight's."""
    from fast.kernels.triton_gemv import select

    p = of_stored(w, x.numel() // x.shape[-1], x.dtype)
    for family in choose(p if device is None else p._replace(device=device)):
        y = None if family is TORCH_DEQUANTIZE else select.linear(x, w, bias, family.name)
        if y is not None:
            return y
    return None
