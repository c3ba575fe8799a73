"""`quantize_both` for torch tensors; see `reference.both`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import reference
from fast.device import has_kernels
from fast.quantize import quantize
from fast.tensors import require_tensor
from reference import Quantized, Scheme
from reference.schemes import scheme_of


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
    x = x.detach() if x.requires_grad else x
    floating = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if x.dim() != 2 or not floating or not has_kernels(x):
        return reference.quantize_both(
            x, scheme, scales=scales, random_bits=random_bits, packed=packed, tiled=tiled
        )
    fused = _fused(x, scheme_of(scheme), scales, tiled) if random_bits is None else None
    if fused is not None:
        return fused if not packed else (_marked(fused[0]), _marked(fused[1]))
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


def _marked(q: Quantized) -> Quantized:
    """8-bit codes are their own packed storage."""
    return replace(q, packed=True)


def _fused(x: torch.Tensor, scheme: Scheme, scales: Any, tiled: bool) -> tuple[Quantized, Quantized] | None:
    from fast.kernels.pairs import fused_both

    return fused_both(x, scheme, scales, tiled)
