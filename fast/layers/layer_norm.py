"""`layer_norm_quantize` for torch tensors; see `reference.layer_norm_quantize` for the rules.

On a GPU one kernel normalizes and quantizes where blocks lie in rows of up to 32768 columns; anything else runs as the
reference on the tensors' device. Operands are x, weight, bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.ops import no_gradient, record_name, register
from fast.quantize.quantize import fresh_rows, quantized_rows
from reference import Quantized, Scheme
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]
PARTS = ("codes", "scale", "outer", "zero")


def layer_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    scheme: str | Scheme,
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    packed: bool = False,
) -> Quantized:
    """quantize(LayerNorm(x), scheme) on x's device, in one kernel where blocks lie in rows. No gradient flows through.

    Arguments, edges and errors as in `reference.layer_norm_quantize`.
    """
    q: Quantized = run(LAYER_NORM_QUANTIZE, scheme, (eps, packed), (x, weight, bias))
    return q


def layer_norm_quantize_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scheme: str,
    eps: float,
    packed: bool,
) -> list[torch.Tensor]:
    """Codes, scale, outer scale and zero point, those that there are."""
    q = execute(LAYER_NORM_QUANTIZE, record_of(scheme), (eps, packed), (x, weight, bias))
    return [part for part in (getattr(q, name) for name in PARTS) if part is not None]


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, scheme: str, eps: float, packed: bool
) -> list[torch.Tensor]:
    return fresh_rows(x, scheme, packed)


def _operate(record: Any, values: Values, operands: Operands) -> Quantized:
    (eps, packed), name = values, record_name(record)
    parts = torch.ops.ao_lab.layer_norm_quantize(*operands, name, float(eps), packed)
    return quantized_rows(parts, operands[0], name, packed)


def _reference(record: Any, values: Values, operands: Operands) -> Quantized:
    x, weight, bias = operands
    return reference.layer_norm_quantize(x, weight, record, bias=bias, eps=values[0], packed=values[1])


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Quantized | None:
    from fast.kernels.layers import layer_norm

    return layer_norm.layer_norm_quantize(*operands, record, *values, key)


LAYER_NORM_QUANTIZE = Function("layer_norm_quantize", ("x", "weight", "bias"), _reference, _operate, _kernel)
register(
    "layer_norm_quantize", layer_norm_quantize_op, _fake,
    no_gradient("layer_norm_quantize", "its results are codes; use torch's layer_norm, and fake_quantize"),
)  # fmt: skip


__all__ = ["layer_norm_quantize"]
