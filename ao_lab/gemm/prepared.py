"""Which products of a weight can be prepared for eager inference, by the kernel that computes them (`ao_lab.gemm.select`).

Those that are launches of ours and nothing else, or these and `torch._scaled_mm`. Apart from `select.PRODUCTS`, which training
reaches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ao_lab.gemm.choices import choices_for
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.codes import multiplies_codes
from ao_lab.gemm.products.dense import loses_nan
from ao_lab.gemm.products.fused import PRESHUFFLED
from ao_lab.gemm.products.scaled_blocks import BLOCK
from ao_lab.gemm.products.scaled_mm import FLOAT8
from ao_lab.gemm.select import select_kernel
from fast.launch.program import Program
from fast.prepared import (
    ScaledProduct,
    prepared_linear,
    prepared_linear_of_codes,
    prepared_linear_small,
    prepared_scaled_mm,
)

#: What is called as `prepared.launch(prepared, x, bias)`.
Prepared = Program | ScaledProduct
#: Of inputs (M, K) that were multiplied just now, a weight (K, N), a bias and the shape of the result.
Prepare = Callable[[torch.Tensor, QuantizedWeight, torch.Tensor | None, tuple[int, ...]], Prepared | None]


def is_tuned(device: torch.device) -> bool:
    """Whether something was tuned for inference on a device: then the kernel depends on the rows, and on what is pinned."""
    return any(choice.problem.direction == "inference" for choice in choices_for(device))


def prepared_product(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, shape: tuple[int, ...]
) -> Prepared | None:
    """The product of x (M, K), which was computed just now, as a program for inputs like x, its result in a shape of as many
    elements; None for kernels that are more than launches."""
    make = PREPARE.get(select_kernel(w, x.dtype, x.shape[0]))
    return None if make is None or not w.is_cuda else make(x, w, bias, shape)


def _fused(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, shape: tuple[int, ...]
) -> Prepared | None:
    if w.meta.layout == PRESHUFFLED:
        return prepared_linear_small(x, w.stored, bias, shape, w.recipe.activation)
    return prepared_linear(x, w.quantized, bias, shape)


def _codes(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, shape: tuple[int, ...]
) -> Prepared | None:
    """Of rows that are multiplied as codes: by kernels of ours, or by torch of 8-bit floats under scales alike."""
    scheme = w.recipe.activation
    if scheme is None:
        return None
    if multiplies_codes(x, w):
        by_rows = loses_nan(w)
        return prepared_linear_of_codes(x, w.quantized, bias, shape, scheme, w.input_scales, by_rows)
    blocks = scheme.scale.block, w.scheme.scale.block
    if scheme.element not in FLOAT8 or BLOCK in blocks or blocks[0] != blocks[1]:
        return None
    dtypes = FLOAT8[scheme.element], FLOAT8[w.scheme.element]
    return prepared_scaled_mm(x, w.quantized, shape, scheme, w.input_scales, dtypes)


#: By the names of `select.PRODUCTS`.
PREPARE: dict[str, Prepare] = {"fused": _fused, "int8": _codes, "scaled_mm": _codes}

__all__ = ["PREPARE", "Prepared", "is_tuned", "prepared_product"]
