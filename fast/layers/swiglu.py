"""`swiglu` and `swiglu_quantize` for torch tensors; see `reference.swiglu` for the rules."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.device import has_kernels
from fast.kernels.launch import cache as ready
from fast.quantize.quantize import quantize
from fast.tensors import require_tensor
from reference import Quantized, Scheme


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up on gate's device. Arguments, edges and errors as in `reference.swiglu`.

    gate and up may be halves of one matrix: rows are read where they lie.
    """
    gate = require_tensor(gate, "swiglu")
    key, known = ready.call("swiglu", None, _strides(gate, up), gate, up)
    if known is not None:
        return known  # type: ignore[no-any-return]
    gate = gate.detach()
    if has_kernels(gate):
        from fast.kernels.layers import swiglu as kernels

        made = kernels.swiglu(gate, up, key)
        if made is not None:
            return made
    return reference.swiglu(gate, up)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, scheme: str | Scheme, *, packed: bool = False
) -> Quantized:
    """quantize(swiglu(gate, up), scheme), in one kernel where blocks lie in rows.

    Arguments, edges and errors as in `reference.swiglu_quantize`.
    """
    gate = require_tensor(gate, "swiglu_quantize")
    key, known = ready.call("swiglu_quantize", scheme, (packed, *_strides(gate, up)), gate, up)
    if known is not None:
        return known  # type: ignore[no-any-return]
    gate = gate.detach()
    if not has_kernels(gate):
        return reference.swiglu_quantize(gate, up, scheme, packed=packed)
    from fast.kernels.layers import swiglu as kernels

    made = kernels.swiglu_quantize(gate, up, scheme, packed, key)
    if made is not None:
        return made
    return quantize(swiglu(gate, up), scheme, packed=packed)


def _strides(gate: torch.Tensor, up: Any) -> tuple[Any, ...]:
    """Where rows lie: they are read there."""
    return (gate.stride(), up.stride()) if isinstance(up, torch.Tensor) else ()
