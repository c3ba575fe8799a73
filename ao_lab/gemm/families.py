"""Which families of kernels multiply by a weight on a GPU, by ranges of rows: what `ao_lab.explain` prints."""

from __future__ import annotations

import torch

from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.codes import activation, multiplies_codes
from ao_lab.gemm.products.fused import PRESHUFFLED
from ao_lab.gemm.select import select_kernel
from fast.gemm import choose, families
from fast.gemm.choose import Range, by_rows
from fast.gemm.families import Family
from fast.matmul.preshuffled import layout

#: Rows of inputs that are asked for, at most: what multiplies these multiplies more.
MOST = 1 << 15
#: torch's product of codes, by the kernels that call it.
OF_TORCH = {"int8": families.TORCH_INT_MM, "scaled_mm": families.TORCH_SCALED_MM}


def families_by_rows(w: QuantizedWeight, dtype: torch.dtype) -> tuple[Range, ...]:
    """The ranges of rows of inputs in a dtype by a weight (K, N) on a GPU, each with the name of what multiplies them: a family
    of `fast.gemm.families`, or the kernel of `ao_lab.gemm.select` where that is one for all rows. () elsewhere."""
    if not w.is_cuda or len(w.shape) != 2:
        return ()
    return by_rows(lambda rows: _name(w, dtype, rows), MOST)


def _name(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> str:
    """What multiplies so many rows."""
    kernel = select_kernel(w, dtype, rows)
    if kernel == "dequantize":
        return families.TORCH_DEQUANTIZE.name
    if kernel == "fused":
        return _by_weight(w, dtype, rows).name
    return _by_codes(kernel, w, dtype, rows).name if kernel in OF_TORCH else kernel


def _by_weight(w: QuantizedWeight, dtype: torch.dtype, rows: int) -> Family:
    """Of inputs as they are, or in a scheme in front of the product."""
    if w.meta.layout != PRESHUFFLED:
        return next(choose.stored(w.quantized, rows, dtype))
    from fast.kernels.linear_small.layout import ArrangedWeight

    stored = w.stored
    shape = (int(stored.shape[0]), int(stored.shape[1]))
    form = layout.form_of(stored.scheme, shape[1])
    arranged = ArrangedWeight(stored.codes, stored.scale, stored.zero, shape, *form)
    return next(choose.preshuffled(arranged, rows, dtype))


def _by_codes(kernel: str, w: QuantizedWeight, dtype: torch.dtype, rows: int) -> Family:
    """Of inputs that are quantized to 8 bits."""
    x = torch.empty((rows, w.shape[0]), dtype=dtype, device="meta")
    if not multiplies_codes(x, w):
        return OF_TORCH[kernel]
    shape = (int(w.shape[1]), int(w.shape[0]))
    return next(choose.codes(activation(w), w.scheme, shape, rows, dtype, w.device))


__all__ = ["MOST", "families_by_rows"]
