"""torch's own products of 8-bit floats with scales: `torch._scaled_mm`, by one scale for tensors or rows, or by blocks of 128.

What it takes of blocks (torch 2.11 to 2.13, compute capability 9.0): 1x128 with 1x128 or with 128x128, scales in float32 that
decode. Those of 1x128 lie block after block, (M, K/128) with strides (1, M). Those of 128x128 run along K, K/128 rounded up to
a multiple of 4, which `torch._scaled_mm` does not know: it reads past its scales where K/128 is no such multiple, and gives
NaN. There `_scaled_mm_v2` takes padded ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reference import Quantized, Scheme
from reference.training.recipe import Product

#: Formats that `torch._scaled_mm` multiplies, and torch's dtypes of them.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: What `torch._scaled_mm` asks of the sum's length and of the columns.
STEP = 16
#: GPUs from this compute capability on multiply 8-bit floats; of this one by blocks.
FIRST, OF_BLOCKS = 89, 90
#: Elements under a scale, and what their number is a multiple of along the sum under scales of squares.
BLOCK, PADDED = 128, 4
#: `torch.nn.functional.ScalingType` of blocks 1x128 and 128x128, as the operator takes them.
ROW, SQUARE = 4, 5


def capability(device: torch.device) -> int:
    """The compute capability of a GPU, 90 for 9.0; 0 of anything else."""
    return _capability(device.index) if device.type == "cuda" else 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit floats."""
    return capability(device) >= FIRST


def is_one_scale(scheme: Scheme) -> bool:
    """Whether a scheme has one float32 scale for the tensor or for each row, which multiplies codes."""
    return _multiplies(scheme) and scheme.scale.block in ("tensor", -1)


def _multiplies(scheme: Scheme) -> bool:
    """Whether float32 scales multiply codes, and nothing else does anything to them."""
    plain = scheme.outer is None and scheme.zero is None and scheme.scale.storage == "float32"
    return plain and scheme.scale.stored == "decode"


def unsupported_reason(a: Any, b: Any) -> str | None:
    """Why `scaled_mm` does not take two operands."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return "both operands must be quantized"
    if not has_fp8(a.codes.device):
        return "it needs a GPU with FP8 units"
    kinds = {a.scheme.element, b.scheme.element}
    if not kinds <= FLOAT8.keys() or kinds == {"float8_e5m2"}:
        return "it multiplies e4m3 by e4m3 or e5m2"
    if not (is_one_scale(a.scheme) and is_one_scale(b.scheme)):
        return "each tensor or each row must have one float32 scale for decoding"
    if a.shape[1] % STEP or b.shape[0] % STEP or 0 in (*a.shape, *b.shape):
        return f"the sum's length and the columns must be multiples of {STEP}, and nothing may be empty"
    return None


def blocks_unsupported_reason(a: Any, b: Any) -> str | None:
    """Why `scaled_mm_blocks` does not take two operands."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return "both operands must be quantized"
    if capability(a.codes.device) != OF_BLOCKS:
        return "it needs a GPU of compute capability 9.0"
    if a.scheme.element != "float8_e4m3fn" or b.scheme.element != "float8_e4m3fn":
        return "it multiplies e4m3 by e4m3"
    square = b.scheme.scale.block == (BLOCK, BLOCK)
    if a.scheme.scale.block != BLOCK or not (square or b.scheme.scale.block == BLOCK):
        return "blocks must be 1x128 of a, and 1x128 or 128x128 of b"
    if not (_multiplies(a.scheme) and _multiplies(b.scheme)):
        return "scales must be float32 and decode"
    if a.shape[1] % BLOCK or b.shape[0] % (BLOCK if square else STEP):
        return f"blocks of {BLOCK} must divide the sum's length, and those of b its rows"
    if a.shape[0] % STEP or 0 in (*a.shape, *b.shape):
        return f"the rows must be a multiple of {STEP}, and nothing may be empty"
    return None


def scaled_mm(a: Any, b: Any, record: Product, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    """a (M, K) @ b.T (K, N) plus bias (N) in `dtype`, of one scale for each tensor or each row."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        raise TypeError("scaled_mm takes two quantized operands")
    left, right = a.codes.view(FLOAT8[a.scheme.element]), b.codes.view(FLOAT8[b.scheme.element])
    scale_a, scale_b = a.scale, b.scale
    if scale_a.dim() or scale_b.dim():
        # One scale in all beside one for each row becomes one for each row.
        scale_a = scale_a.view(-1, 1) if scale_a.dim() else scale_a.expand(left.shape[0], 1).contiguous()
        scale_b = scale_b.view(1, -1) if scale_b.dim() else scale_b.expand(1, right.shape[0]).contiguous()
    after = _added_after(bias, dtype)
    y: torch.Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=None if after else bias,
        out_dtype=dtype,
        use_fast_accum=record.accumulation == "fast",
    )
    return y.add_(bias) if after and bias is not None else y


def scaled_mm_blocks(
    a: Any, b: Any, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same of blocks along the sum, precise whichever accumulation is asked for."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        raise TypeError("scaled_mm_blocks takes two quantized operands")
    square, after = b.scheme.scale.block != BLOCK, _added_after(bias, dtype)
    multiply = _blocks_op if torch.compiler.is_compiling() else _blocks
    y: torch.Tensor = multiply(a.codes, b.codes, a.scale, b.scale, square, dtype, None if after else bias)
    return y.add_(bias) if after and bias is not None else y


def _added_after(bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the bias is added to the product: with float32 results cuBLAS takes none."""
    return bias is not None and dtype == torch.float32


def _blocks(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, square: bool, dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """codes a (M, K), b (N, K), scales (M, K/128) and (N, K/128), or (N/128, K/128) of squares."""
    left, right = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).t()
    scale_a = scale_a.t().contiguous().t()
    more = -scale_b.shape[1] % PADDED
    if not square or not more:
        scale_b = scale_b.t() if square else scale_b.t().contiguous()
        return torch._scaled_mm(left, right, scale_a, scale_b, bias, out_dtype=dtype)
    scale_b = nn.functional.pad(scale_b, (0, more)).t()
    made: torch.Tensor = torch.ops.aten._scaled_mm_v2(
        left, right, [scale_a], [ROW], [0], [scale_b], [SQUARE], [0], bias, dtype
    )
    return made


#: While a program is traced: compilers have products of blocks of their own.
_blocks_op = torch.library.custom_op("ao_lab::scaled_mm_blocks", _blocks, mutates_args=())


@_blocks_op.register_fake
def _blocks_fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, square: bool, dtype: torch.dtype, bias: Any
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


__all__ = [
    "STEP",
    "blocks_unsupported_reason",
    "has_fp8",
    "is_one_scale",
    "scaled_mm",
    "scaled_mm_blocks",
    "unsupported_reason",
]
