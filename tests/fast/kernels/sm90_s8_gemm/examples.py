"""Codes, scales and biases for tests of the kernel, and what the reference makes of them."""

from __future__ import annotations

from typing import Any

import torch

import reference
from reference import SCHEMES, Quantized


def operands(m: int, n: int, k: int, bias: torch.dtype | None = None, *, seed: int = 0) -> list[Any]:
    """Codes of x of all sizes, scale, no zero point, codes of the weight, scale, bias."""
    g = torch.Generator().manual_seed(seed)
    x, w = (torch.randint(0, 256, (rows, k), generator=g).to(torch.uint8) for rows in (m, n))
    scales = torch.rand(m, 1, generator=g) + 0.1, torch.rand(n, 1, generator=g) - 0.5
    added = None if bias is None else (1e4 * torch.randn(n, generator=g)).to(bias)
    return [x, scales[0], None, w, scales[1], added]


def quantized(given: list[Any]) -> tuple[Quantized, Quantized]:
    """x and the weight."""
    x, x_scale, zero, w, scale, _ = given
    rowwise = "int8_rowwise" if zero is None else "int8_rowwise_asymmetric"
    first, second = (
        Quantized(
            codes=codes, scale=own, outer=None, zero=point, shape=tuple(codes.shape), axis=1,
            scheme=SCHEMES[name if own.dim() else "int8_tensorwise"],
        )
        for codes, own, point, name in ((x, x_scale, zero, rowwise), (w, scale, None, "int8_rowwise"))
    )  # fmt: skip
    return first, second


def expected(given: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """One block of the blocked tier: exact sums, each step rounded to float32, one rounding."""
    x, w = quantized(given)
    name = str(dtype).removeprefix("torch.")
    made: torch.Tensor = reference.linear(
        x, w, given[5], accumulation="blocked", block=w.shape[1], out_dtype=name
    )
    return made


__all__ = ["expected", "operands", "quantized"]
