"""`choose_scales`, `quantize` and `dequantize` for torch tensors; see `reference.quantize` for the rules."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.dispatch import require_tensor, run
from fast.launch.cache import settings
from fast.quantize.ops import CHOOSE_SCALES, DEQUANTIZE, as_turned, operands_of
from reference import Quantized, Scales, Scheme
from reference.arrays.errors import DTypeLike, dtype_name
from reference.arrays.namespace import FLOAT_DTYPES
from reference.quantize.quantize import check_quantized, with_plain_scales

#: What needs no other spelling.
NAMED = frozenset([*FLOAT_DTYPES, *(getattr(torch, name) for name in FLOAT_DTYPES)])


def choose_scales(x: torch.Tensor, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x, as in `reference.choose_scales`, on x's device. No gradient flows through them."""
    scales: Scales = run(CHOOSE_SCALES, scheme, (axis,), (x,))
    return scales


def quantize(
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | torch.Tensor | None = None,
    random_bits: torch.Tensor | None = None,
    packed: bool = False,
    tiled: bool = False,
) -> Quantized:
    """x as codes and scales on its device, without gradient. Arguments, edges and errors as in `reference.quantize`.

    x may be the transposed view of a contiguous matrix: a kernel that turns tiles then makes 8-bit floats without a copy.
    """
    operands = (x,) if scales is None and random_bits is None else operands_of(x, scales, random_bits)
    function, operands = as_turned(operands, axis, tiled)
    q: Quantized = run(function, scheme, (axis, packed, tiled), operands)
    return q


def dequantize(q: Quantized, dtype: DTypeLike = "float32") -> torch.Tensor:
    """The tensor that q stands for, without gradient; dtype in any spelling. As in `reference.dequantize`."""
    if type(dtype) not in (str, torch.dtype) or dtype not in NAMED:
        dtype = dtype_name(dtype, FLOAT_DTYPES, "dtype")
    if not isinstance(q, Quantized):
        # The reference says what is wrong.
        made: Any = reference.dequantize(q, dtype)
        return require_tensor(made, "dequantize")
    require_tensor(q.codes, "dequantize")
    if q.tiled:
        check_quantized(q)
        q = with_plain_scales(q)
    y: torch.Tensor = run(DEQUANTIZE, q.scheme, (dtype, *settings(q)), (q.codes, q.scale, q.outer, q.zero))
    return y
