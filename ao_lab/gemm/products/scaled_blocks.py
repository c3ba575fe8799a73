"""torch's product of 8-bit floats under scales of blocks: 1x128 of the first operand, 1x128 or 128x128 of the second.

What it takes of them (torch 2.11 to 2.13, compute capability 9.0): scales in float32 that decode. Those of 1x128 lie block
after block, (M, K/128) with strides (1, M). Those of 128x128 run along K, K/128 rounded up to a multiple of 4, which
`torch._scaled_mm` does not know: it reads past its scales where K/128 is no such multiple, and gives NaN. There
`_scaled_mm_v2` takes padded ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reference import Scheme

#: Elements under a scale.
BLOCK = 128
#: What the number of scales is a multiple of along the sum, under scales of squares.
PADDED = 4
#: What rows of the first operand, and columns under scales of 1x128, are multiples of.
STEP = 16
#: The compute capability that it is for.
CAPABILITY = (9, 0)
#: `torch.nn.functional.ScalingType` of blocks 1x128 and 128x128, as the operator takes them.
ROW, SQUARE = 4, 5


def decodes(scheme: Scheme) -> bool:
    """Whether float32 scales multiply codes, and nothing else does anything to them."""
    plain = scheme.outer is None and scheme.zero is None and scheme.scale.storage == "float32"
    return plain and scheme.scale.stored == "decode"


def blocks_reason(a: Scheme, b: Scheme, shape: tuple[int, ...]) -> str | None:
    """Why operands (M, K) and (N, K) are not multiplied, whatever M and the device are. shape: (N, K)."""
    if a.element != "float8_e4m3fn" or b.element != "float8_e4m3fn":
        return "it multiplies e4m3 by e4m3"
    square = b.scale.block == (BLOCK, BLOCK)
    if a.scale.block != BLOCK or not (square or b.scale.block == BLOCK):
        return "blocks must be 1x128 of a, and 1x128 or 128x128 of b"
    if not (decodes(a) and decodes(b)):
        return "scales must be float32 and decode"
    if shape[1] % BLOCK or shape[0] % (BLOCK if square else STEP):
        return f"blocks of {BLOCK} must divide the sum's length, and those of b its rows"
    return None


def whole_steps(x: torch.Tensor) -> torch.Tensor:
    """Inputs (M, K) with rows of zeros up to a multiple of 16, before they are quantized: codes and scales are two to pad.

    As they are where a tracer leaves M open, which no program may depend on: the product pads then.
    """
    more = -x.shape[0] % STEP if isinstance(x.shape[0], int) else 0
    return nn.functional.pad(x, (0, 0, 0, more)) if more else x


def blocks_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, square: bool, dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """codes a (M, K), b (N, K), scales (M, K/128) and (N, K/128), or (N/128, K/128) of squares: a @ b.T plus bias (N) in dtype.

    M is a multiple of 16, or a size that a tracer leaves open. Sums of 128 products are added in float32.
    """
    multiply = _op if torch.compiler.is_compiling() else _multiply
    y: torch.Tensor = multiply(a, b, scale_a, scale_b, square, dtype, bias)
    return y


def _multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, square: bool, dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    rows = a.shape[0]
    if more := -rows % STEP:
        a = nn.functional.pad(a.view(torch.uint8), (0, 0, 0, more))
        scale_a = nn.functional.pad(scale_a, (0, 0, 0, more))
        return _multiply(a, b, scale_a, scale_b, square, dtype, bias)[:rows].clone()
    left, right = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).t()
    scale_a = scale_a.t().contiguous().t()
    more = -scale_b.shape[1] % PADDED
    if not square or not more:
        # Of a weight that was sliced along K scales are a view of the whole one's.
        scale_b = scale_b.contiguous().t() if square else scale_b.t().contiguous()
        return torch._scaled_mm(left, right, scale_a, scale_b, bias, out_dtype=dtype)
    scale_b = nn.functional.pad(scale_b, (0, more)).t()
    made: torch.Tensor = torch.ops.aten._scaled_mm_v2(
        left, right, [scale_a], [ROW], [0], [scale_b], [SQUARE], [0], bias, dtype
    )
    return made


#: While a program is traced: compilers have products of blocks of their own.
_op = torch.library.custom_op("ao_lab::scaled_mm_blocks", _multiply, mutates_args=())


@_op.register_fake
def _fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, square: bool, dtype: torch.dtype, bias: Any
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


__all__ = ["BLOCK", "CAPABILITY", "STEP", "blocks_product", "blocks_reason", "decodes", "whole_steps"]
