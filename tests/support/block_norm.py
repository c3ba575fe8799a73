"""Operands whose products and squares have exact sums, so that any order gives the same bits."""

from __future__ import annotations

import torch

from reference import SCHEMES, Quantized, encode


def small_integers(rows: int, length: int, seed: int) -> Quantized:
    """Codes of -1, 0 and 1 in e4m3, a scale a row, a power of two: sums of squares of 256 of their products fit 24 bits."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, (rows, length), generator=generator).float()
    scale = torch.exp2(torch.randint(-1, 2, (rows, 1), generator=generator).float())
    codes = encode(values, "float8_e4m3fn")
    return Quantized(codes, scale, None, None, (rows, length), 1, SCHEMES["fp8_rowwise"])


#: (M, N, K), activation, scheme of the result, dtype of the result, whether there is a bias.
CASES = (
    ((130, 512, 48), "none", "", "bfloat16", False),
    ((130, 512, 48), "hard_swish", "fp8_1x128", "bfloat16", True),
    ((3, 256, 144), "hard_swish", "", "float16", True),
    ((64, 768, 32), "none", "fp8_1x128", "float32", False),
    ((257, 256, 64), "hard_swish", "", "float32", False),
)


def operands(case) -> tuple[Quantized, Quantized, torch.Tensor, torch.Tensor | None]:
    """x, w, gain, bias."""
    (m, n, k), _, _, _, biased = case
    gain = torch.randn(n, generator=torch.Generator().manual_seed(3))
    bias = torch.randint(-2, 3, (n,), generator=torch.Generator().manual_seed(4)).float() if biased else None
    return small_integers(m, k, 1), small_integers(n, k, 2), gain, bias


__all__ = ["CASES", "operands", "small_integers"]
