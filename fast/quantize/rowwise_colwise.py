"""`quantize_both` for torch tensors; see `reference.quantize.rowwise_colwise`."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.device import has_kernels
from fast.kernels.launch import cache as ready
from fast.quantize.quantize import quantize
from fast.tensors import require_tensor
from reference import Quantized, Scheme


def quantize_both(
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Any = None,
    random_bits: Any = None,
    packed: bool = False,
    tiled: bool = False,
) -> tuple[Quantized, Quantized]:
    """x along its last axis, and x.T along its last axis: arguments, edges and errors as in `reference.quantize_both`.

    On a GPU MX schemes with 8-bit floats, and tensorwise 8-bit floats with a given pair of scales, read x once.
    """
    require_tensor(x, "quantize_both")
    key, known = _call(x, scheme, scales, packed, tiled) if random_bits is None else (None, None)
    if known is not None:
        return known  # type: ignore[no-any-return]
    x = x.detach() if x.requires_grad else x
    floating = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if x.dim() != 2 or not floating or not has_kernels(x):
        return reference.quantize_both(
            x, scheme, scales=scales, random_bits=random_bits, packed=packed, tiled=tiled
        )
    if random_bits is None:
        from fast.kernels.rowwise_colwise.host import fused_both

        fused = fused_both(x, scheme, scales, tiled, packed, key)
        if fused is not None:
            return fused
    for name, pair in (("scales", scales), ("random_bits", random_bits)):
        if pair is not None and not (isinstance(pair, tuple) and len(pair) == 2):
            # The reference says what is wrong.
            return reference.quantize_both(x, scheme, **{name: pair})
    first, second = scales or (None, None)
    words = random_bits or (None, None)
    return (
        quantize(x, scheme, scales=first, random_bits=words[0], packed=packed, tiled=tiled),
        quantize(x.T.contiguous(), scheme, scales=second, random_bits=words[1], packed=packed, tiled=tiled),
    )


def _call(x: torch.Tensor, scheme: str | Scheme, scales: Any, packed: bool, tiled: bool) -> tuple[Any, Any]:
    """`ready.call`; with whether both scales are one tensor, which a kernel then reads once."""
    if scales is None:
        return ready.call("quantize_both", scheme, (packed, tiled), x)
    if scales.__class__ is not tuple or len(scales) != 2:
        return None, None
    first, second = map(ready.parts_of, scales)
    return ready.call("quantize_both", scheme, (packed, tiled, first[0] is second[0]), x, *first, *second)
