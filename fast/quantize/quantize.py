"""`choose_scales`, `quantize` and `dequantize` for torch tensors; see `reference.quantize` for the rules."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast import ops
from fast.device import has_kernels, is_traced
from fast.kernels.launch import cache as ready
from fast.tensors import require_tensor
from reference import Quantized, Scales, Scheme


def choose_scales(x: torch.Tensor, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x, as in `reference.choose_scales`, on x's device."""
    key, known = ready.call("choose_scales", scheme, (axis,), require_tensor(x, "choose_scales"))
    if known is not None:
        return known  # type: ignore[no-any-return]
    x = x.detach()
    if has_kernels(x):
        from fast.kernels.quantize import host as quantizer

        made = quantizer.choose_scales(x, scheme, axis, key)
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
    tensors = ready.inputs(require_tensor(x, "quantize"), scales, random_bits)
    key, known = ready.call("quantize", scheme, (axis, packed, tiled), *tensors)
    if known is not None:
        return known  # type: ignore[no-any-return]
    if is_traced(x):
        return ops.quantize(x, scheme, axis, scales, random_bits, packed, tiled)
    x = x.detach() if x.requires_grad else x
    if has_kernels(x):
        from fast.kernels.quantize import host as quantizer

        made = quantizer.quantize(x, scheme, axis, scales, random_bits, packed, tiled, key)
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
    key, known = _stored_call(q, dtype) if stored else (None, None)
    if known is not None:
        return known  # type: ignore[no-any-return]
    name = str(dtype).removeprefix("torch.")
    if stored and has_kernels(q.codes):
        from fast.kernels.quantize import host as quantizer

        fast = quantizer.dequantize(q, name, key)
        if fast is not None:
            return fast
    made: Any = None
    if stored and isinstance(q.scheme, Scheme) and q.codes.device.type == "cpu" and not is_traced(q.codes):
        from fast.cpu.dequantize import dequantize as tiled

        made = tiled(q, name)
    return require_tensor(reference.dequantize(q, name) if made is None else made, "dequantize")


def _stored_call(q: Quantized, dtype: Any) -> tuple[Any, Any]:
    """`ready.call` of `dequantize`."""
    values = (dtype, *ready.settings(q))
    return ready.call("dequantize", q.scheme, values, q.codes, q.scale, q.outer, q.zero)
