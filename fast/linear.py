"""`linear`: inputs times a stored weight, for torch tensors; see `reference.linear`."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast import ready
from fast.device import has_kernels
from fast.quantize import dequantize
from fast.tensors import require_tensor
from reference import Quantized
from reference.linear import check_linear


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype and on its device.

    On a GPU codes are decoded on the way to the products and nothing dense is made, for one row and for up to 128 rows of
    bfloat16 or float16; the result is within `reference.matmul_error_bound` (accumulation "blocked", any order) of the exact
    product, where |c - z| counts as |c| + |z| under a zero point. Other calls on a GPU multiply in float32 what `dequantize`
    gives. CPU tensors run `reference.linear`: exact, and slow. Arguments and errors are those of `reference.linear`.
    """
    key, known = _call(require_tensor(x, "linear"), w, bias)
    if known is not None:
        return known  # type: ignore[no-any-return]
    x = x.detach()
    check_linear(x, w, bias)
    if not has_kernels(x):
        return require_tensor(reference.linear(x, w, bias), "linear")
    from fast.kernels import linear as kernels

    made = kernels.linear(x, w, bias, key)
    if made is not None:
        return made
    added = None if bias is None else bias.to(torch.float32)
    dense = dequantize(w, torch.float32)
    return torch.nn.functional.linear(x.to(torch.float32), dense, added).to(x.dtype)


def _call(x: torch.Tensor, w: Any, bias: Any) -> tuple[Any, Any]:
    """`ready.call` of `linear`."""
    if not isinstance(w, Quantized):
        return None, None
    return ready.call("linear", w.scheme, ready.settings(w), x, w.codes, w.scale, w.outer, w.zero, bias)
