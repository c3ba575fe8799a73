"""Products of rows sorted by expert and experts' weights."""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.dense import rounded, sums_along_blocks
from ao_lab.gemm.products.device import capability
from ao_lab.gemm.products.fused import PRESHUFFLED
from fast.device import OLDEST
from fast.matmul.preshuffled.grouped import grouped_linear_small
from fast.matmul.preshuffled.linear import INPUTS


def grouped_product(
    x: torch.Tensor, w: QuantizedWeight, func: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """torch._grouped_mm (`func`) of tokens sorted by expert and the experts' weights (E, K, N).

    args, kwargs: offsets, bias and dtype, as torch has them. Kernel "fused" where the weights are preshuffled on a GPU, inputs
    have 16 bits and nothing but offsets is asked for; else "dequantize".
    """
    able = groups_reason(w, x.dtype) is None
    if sums_along_blocks(w) and not able and w.recipe.kernel not in ("auto", "dequantize"):
        raise ValueError(f"kernel {w.recipe.kernel!r} multiplies no groups; these do: dequantize")
    given = {**dict(zip(("offs", "bias", "out_dtype"), args, strict=False)), **kwargs}
    plain = given.get("bias") is None and given.get("out_dtype") in (None, x.dtype)
    if able and plain and x.dim() == 2 and given.get("offs") is not None:
        return grouped_linear_small(x, w.stored, given["offs"])
    result: torch.Tensor = func(rounded(x, w), w.dequantize(x.dtype), *args, **kwargs)
    return result


def groups_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why groups of rows of a dtype are not multiplied by weights (E, K, N) as these are stored; None where they are."""
    if w.meta.layout != PRESHUFFLED or len(w.shape) != 3 or not w.meta.transposed:
        return "the weights must be preshuffled, and stored as (experts, out, in)"
    if w.recipe.activation is not None:
        return "its inputs must not be quantized"
    if not w.is_cuda or capability(w.device.index or 0) < OLDEST:
        return "its kernel is for GPUs of compute capability {}.{} and later".format(*OLDEST)
    return None if dtype in INPUTS else f"it does not read {dtype}"


__all__ = ["grouped_product", "groups_reason"]
