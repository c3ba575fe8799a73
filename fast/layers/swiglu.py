"""`swiglu` and `swiglu_quantize` for torch tensors; see `reference.swiglu` for the rules."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.layers.ops import SWIGLU, SWIGLU_QUANTIZE, strides
from reference import Quantized, Scheme


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up on gate's device; differentiable. Arguments, edges and errors as in `reference.swiglu`.

    gate and up may be halves of one matrix: rows are read where they lie. Gradients are those of `fast.layers.gradients`.
    """
    y: torch.Tensor = run(SWIGLU, None, strides(gate, up), (gate, up))
    return y


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, scheme: str | Scheme, *, packed: bool = False
) -> Quantized:
    """quantize(swiglu(gate, up), scheme), in one kernel where blocks lie in rows. No gradient flows through.

    Arguments, edges and errors as in `reference.swiglu_quantize`.
    """
    q: Quantized = run(SWIGLU_QUANTIZE, scheme, (packed, *strides(gate, up)), (gate, up))
    return q
