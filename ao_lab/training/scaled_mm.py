"""torch's own products of 8-bit floats with scales: by one scale for tensors or rows, or by blocks of 128, which
`ao_lab.gemm.codes` multiplies for inference too."""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.gemm.codes import BLOCK, CAPABILITY, STEP, blocks_product, blocks_reason, decodes
from reference import Quantized, Scheme
from reference.training.recipe import Product

#: Formats that `torch._scaled_mm` multiplies, and torch's dtypes of them.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: GPUs from this compute capability on multiply 8-bit floats.
FIRST = 89


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
    return decodes(scheme) and scheme.scale.block in ("tensor", -1)


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
    if divmod(capability(a.codes.device), 10) != CAPABILITY:
        return "it needs a GPU of compute capability 9.0"
    if (reason := blocks_reason(a.scheme, b.scheme, b.shape)) is not None:
        return reason
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
    y = blocks_product(a.codes, b.codes, a.scale, b.scale, square, dtype, None if after else bias)
    return y.add_(bias) if after and bias is not None else y


def _added_after(bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the bias is added to the product: with float32 results cuBLAS takes none."""
    return bias is not None and dtype == torch.float32


__all__ = [
    "STEP",
    "blocks_unsupported_reason",
    "has_fp8",
    "is_one_scale",
    "scaled_mm",
    "scaled_mm_blocks",
    "unsupported_reason",
]
