"""`linear`: inputs times a stored weight, for torch tensors; see `reference.linear`."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import reference
from fast import ops, ready
from fast.device import has_kernels, is_traced
from fast.quantize import dequantize
from fast.tensors import require_tensor
from reference import Quantized
from reference.linear import check_linear


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype and on its device.

    On a GPU codes are decoded on the way to the products and nothing dense is made, for one row and for up to 128 rows of
    bfloat16 or float16 (32 where scales change along K); the result is within `reference.linear_error_bound` of the exact
    product, which promises nothing where sums of codes and inputs leave float32 before their scale: there, and where an input
    is infinite, a result may be NaN. Where no kernel takes them (see `rows_fused`), torch multiplies what `dequantize` gives
    in x's dtype. CPU tensors run `reference.linear`: exact, and slow. Arguments and errors are those of `reference.linear`.
    """
    key, known = _call(require_tensor(x, "linear"), w, bias)
    if known is not None:
        return known  # type: ignore[no-any-return]
    check_linear(x, w, bias)
    require_tensor(w.codes, "linear")
    if is_traced(x) or is_traced(w.codes):
        return ops.linear(x, w, bias)
    x = x.detach()
    if not has_kernels(x):
        return require_tensor(reference.linear(x, w, bias), "linear")
    from fast.kernels import linear as kernels

    made = kernels.linear(x, w, bias, key)
    if made is not None:
        return made
    added = None if bias is None else bias.detach().to(x.dtype)
    return torch.nn.functional.linear(x, dequantize(w, x.dtype), added)


def rows_fused(w: Quantized, dtype: torch.dtype) -> int:
    """The most rows of a dtype that a kernel multiplies by a stored weight on a GPU of `device.OLDEST` or later; 0 for none."""
    if importlib.util.find_spec("triton") is None:
        return 0
    from fast.kernels.linear import MOST_BLOCK_ROWS, MOST_ROWS, launch_for

    return next(
        (count for count in (MOST_ROWS, MOST_BLOCK_ROWS, 1) if launch_for(w, count, dtype) is not None), 0
    )


def _call(x: torch.Tensor, w: Any, bias: Any) -> tuple[Any, Any]:
    """`ready.call` of `linear`."""
    if torch.compiler.is_compiling() or not isinstance(w, Quantized):
        return None, None
    return ready.call("linear", w.scheme, ready.settings(w), x, w.codes, w.scale, w.outer, w.zero, bias)
