"""Products with the dequantized weight, "dequantize" and "reference": they take every recipe; what is asked of devices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

import fast
from ao_lab.gemm.operand import QuantizedWeight
from reference.matmul.linear import transposed
from reference.quantize.quantize import unpacked, with_plain_scales


def dequantized(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) or (B, M, K) as its scheme represents it times w (K, N) or (B, K, N), plus bias (N), all in x's dtype, whatever
    theirs are: so are the products that decode codes on the way, of fewer rows."""
    x, dense = rounded(x, w), w.dequantize(x.dtype)
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    if x.dim() == 2:
        return torch.mm(x, dense) if bias is None else torch.addmm(bias, x, dense)
    return torch.bmm(x, dense) if bias is None else torch.baddbmm(bias, x, dense)


def rounded(x: torch.Tensor, w: QuantizedWeight) -> torch.Tensor:
    """The input as its scheme represents it; itself where it has none."""
    scheme = w.recipe.activation
    if scheme is None or not sums_along_blocks(w):
        return x
    y = fast.fake_quantize(x, scheme, axis=-1, scales=w.input_scales)
    return torch.where(x.isnan(), x, y) if loses_nan(w) else y


def loses_nan(w: QuantizedWeight) -> bool:
    """Whether an input's NaN has no code: of elements without one under static scales; scales that are found hold it."""
    scheme, scales = w.recipe.activation, w.input_scales
    if scheme is None or scales is None or scales.scale is None:
        return False
    return scheme.format.nan_code is None


def nan_rows(x: torch.Tensor) -> torch.Tensor:
    """Bool (..., M, 1): which rows of x (..., M, K) hold a NaN."""
    return x.isnan().any(-1, keepdim=True)


def sums_along_blocks(w: QuantizedWeight) -> bool:
    """Whether the product's sum, over the axis before the last, runs along the blocks."""
    return w.block_axis == -2


# Kernel "reference": `reference.matmul` of both operands, on the host.


def reference(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x times w plus bias in the recipe's accumulation, in x's dtype."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        raise ValueError("kernel 'reference' runs on the host and cannot be traced; use kernel='dequantize'")
    scheme = w.recipe.activation
    left: Any = x if scheme is None else fast.quantize(x, scheme, axis=-1, scales=w.input_scales)
    options: dict[str, Any] = {"accumulation": w.recipe.accumulation, "out_dtype": x.dtype, "bias": bias}
    y: torch.Tensor = fast.matmul(left, as_right_operand(w), **options)
    return torch.where(nan_rows(x), float("nan"), y) if loses_nan(w) else y


def as_right_operand(w: QuantizedWeight) -> Any:
    """The weight (K, N) as `reference.matmul` takes it: a `Quantized` of that shape, or dense float32 where there is none."""
    return transposed(w.quantized) if w.meta.transposed else unpacked(with_plain_scales(w.quantized))


# What a product asks of the device that a weight is on, of torch there, and of sizes that a tracer leaves open.


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU, asked for once."""
    return torch.cuda.get_device_capability(index)


def is_host(device: torch.device) -> bool:
    """Whether torch multiplies float8 as it does on CPUs."""
    return device.type == "cpu"


def is_unbacked(size: Any) -> bool:
    """Whether a program is traced for any value of a size, of which nothing may be asked (`mark_unbacked`)."""
    if isinstance(size, int):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


@lru_cache(maxsize=1)
def cpu_scales_rows() -> bool:
    """Whether torch's float8 product on CPUs takes a scale for each row: some versions fail an assertion there."""
    with _disable_current_modes():  # those that trace would answer for torch
        a, scale = torch.zeros(16, 16, device="cpu").to(torch.float8_e4m3fn), torch.ones(16, 1, device="cpu")
        try:
            torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.float32)
        except RuntimeError:
            return False
    return True


__all__ = [
    "as_right_operand",
    "capability",
    "cpu_scales_rows",
    "dequantized",
    "is_host",
    "is_unbacked",
    "loses_nan",
    "nan_rows",
    "reference",
    "rounded",
    "sums_along_blocks",
]
