"""Part "shapes" of `loka`, on a GPU alone: FP8 matmuls of recommendation models from short sums to very long ones.

LoKA times 27 matmuls of production, of which public notes give two: 2048 x 256 x 768 and 2048 x 123200 x 1024 (tokens x inputs
x outputs). The 25 between are a sweep of ours, equal steps of logarithms rounded to multiples of 16: stand-ins, beside which no
published value is put. Each is timed in bfloat16, as torch's FP8 matmul alone, and with the casts before it, which training
makes of both operands and inference of inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fast
from experiments.loka.fused_speed import COMPARED, ROWWISE, Case, Method, Operands, scaled_mm
from reference import Quantized

SHAPES = "shape speed"
ALONE, INPUTS, BOTH = "fp8 matmul alone", "fp8, inputs cast", "fp8, both operands cast"
#: The published ends (tokens, inputs, outputs), how many shapes a sweep has, and what lengths are multiples of.
FIRST, LAST, COUNT, STEP = (2048, 256, 768), (2048, 123200, 1024), 27, 16


def swept(first: int, last: int, at: int, count: int = COUNT) -> int:
    """The length at a place of a sweep: equal steps of logarithms, rounded to a multiple of STEP; both ends as they are."""
    share = at / (count - 1)
    return STEP * round(math.exp((1 - share) * math.log(first) + share * math.log(last)) / STEP)


def shapes() -> list[tuple[int, ...]]:
    """All of them, tokens x inputs x outputs."""
    return [tuple(swept(a, b, at) for a, b in zip(FIRST, LAST, strict=True)) for at in range(COUNT)]


def operands(case: Case, device: str) -> Operands:
    """x (M, K) and w (N, K), normal, in bfloat16 and quantized with a scale a row."""
    x, w = (
        torch.randn((rows, case.k), device=device, dtype=torch.bfloat16) * scale
        for rows, scale in ((case.m, 1.0), (case.n, case.k**-0.5))
    )
    return x, w, fast.quantize(x, ROWWISE), fast.quantize(w, ROWWISE)


def exact(x: Tensor, w: Tensor, xq: Quantized, wq: Quantized) -> Tensor:
    """The first rows in float32."""
    return x[:COMPARED].float() @ w.float().t()


METHODS: dict[str, Method] = {
    "bfloat16": lambda x, w, xq, wq: functional.linear(x, w),
    ALONE: lambda x, w, xq, wq: scaled_mm(xq, wq),
    INPUTS: lambda x, w, xq, wq: scaled_mm(fast.quantize(x, ROWWISE), wq),
    BOTH: lambda x, w, xq, wq: scaled_mm(fast.quantize(x, ROWWISE), fast.quantize(w, ROWWISE)),
}
CASES = tuple(Case(*shape, operands, exact, METHODS) for shape in shapes())

# What is told of them.

#: TFLOP/s of dense 8-bit floats that NVIDIA states for an H100 and an H200.
PEAK = 1979.0
Value = Callable[[str, str], float | None]


def gains(value: Value, settings: list[str], method: str) -> list[float]:
    """How many times quicker a method is than bfloat16, by shape. value(setting, method): its time."""
    pairs = [(value(one, "bfloat16"), value(one, method)) for one in settings]
    return [base / mine for base, mine in pairs if base and mine]


def cast_shares(value: Value, settings: list[str]) -> list[float]:
    """The share of casts in the time of a matmul whose operands are both cast, by shape."""
    pairs = [(value(one, ALONE), value(one, BOTH)) for one in settings]
    return [1 - alone / whole for alone, whole in pairs if alone and whole]


def peak_share(setting: str, microseconds: float | None) -> float | None:
    """The rate of a matmul, its casts counted as time, over the stated peak."""
    if not microseconds:
        return None
    m, k, n = map(int, setting.split(" x "))
    return 2.0 * m * k * n / microseconds / 1e6 / PEAK


def summary_of(value: Value, settings: list[str]) -> dict[str, Any]:
    """Means over shapes of what LoKA states of its own: speedups with casts and without, the share of casts, and the best rate
    over the peak; None where nothing was timed."""
    parts = {
        ALONE: gains(value, settings, ALONE),
        BOTH: gains(value, settings, BOTH),
        "casts": cast_shares(value, settings),
    }
    best = [share for one in settings if (share := peak_share(one, value(one, BOTH)))]
    told: dict[str, Any] = {name: sum(found) / len(found) if found else None for name, found in parts.items()}
    return told | {"peak": max(best, default=None)}


__all__ = ["ALONE", "BOTH", "CASES", "INPUTS", "SHAPES", "peak_share", "summary_of"]
