"""`choose_scales`, `quantize` and `dequantize` for torch tensors; see `reference.quantize` for the rules."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast import ops, ready
from fast.device import has_kernels, is_traced
from fast.tensors import require_tensor
from reference import Quantized, Scales, Scheme
from reference.schemes import scheme_of


def choose_scales(x: torch.Tensor, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x, as in `reference.choose_scales`, on x's device."""
    x = require_tensor(x, "choose_scales").detach()
    if has_kernels(x):
        from fast.kernels import quantizer

        made = quantizer.choose_scales(x, scheme_of(scheme), axis)
        if made is not None:
            return made
    return reference.choose_scales(x, scheme, axis=axis)


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
    """x as codes and scales on its device. Arguments, edges and errors as in `reference.quantize`."""
    require_tensor(x, "quantize")
    if is_traced(x):
        return ops.quantize(x, scheme, axis, scales, random_bits, packed, tiled)
    if random_bits is None:
        known = ready.quantized(x, scheme, axis, scales, packed, tiled)
        if known is not None:
            return known
    x = x.detach() if x.requires_grad else x
    if has_kernels(x):
        from fast.kernels import quantizer

        made = quantizer.quantize(x, scheme, axis, scales, random_bits, packed, tiled)
        if made is not None:
            return made
    return reference.quantize(
        x, scheme, axis=axis, scales=scales, random_bits=random_bits, packed=packed, tiled=tiled
    )


def dequantize(q: Quantized, dtype: str | torch.dtype = "float32") -> torch.Tensor:
    """The tensor that q stands for; dtype as a name or a torch dtype. As in `reference.dequantize`."""
    stored = isinstance(q, Quantized) and isinstance(q.codes, torch.Tensor)
    if stored and is_traced(q.codes):
        return ops.dequantize(q, dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
    known = ready.dequantized(q, dtype) if stored else None
    if known is not None:
        return known
    name = str(dtype).removeprefix("torch.")
    if stored and has_kernels(q.codes):
        from fast.kernels import quantizer

        fast = quantizer.dequantize(q, name)
        if fast is not None:
            return fast
    made: Any = reference.dequantize(q, name)
    return require_tensor(made, "dequantize")
