"""`linear_block_norm` for torch tensors; see `reference.linear_block_norm` for the rules.

On a GPU one kernel makes the product and, in its epilogue, the norm, the activation and the codes. What it does not take (other
elements, blocks or schemes) runs as the reference on the tensors' device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run, settings
from fast.ops import constant_record, record_name, register
from fast.quantize.quantize import fresh_rows, quantized_rows, stored
from reference import Quantized, Scheme
from reference.arrays.namespace import DTypeLike, choice, dtype_name
from reference.layers.block_norm import ACTIVATIONS, BLOCK, DTYPES, check_linear_block_norm
from reference.quantize.quantize import with_plain_scales
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]


def linear_block_norm(
    x: Quantized,
    w: Quantized,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    block: int = BLOCK,
    eps: float = 1e-6,
    activation: str = "none",
    scheme: str | Scheme | None = None,
    dtype: DTypeLike = "bfloat16",
) -> Any:
    """x (M, K) times the transpose of w (N, K), normalised in blocks of columns: (M, N), or a `Quantized` by a scheme.

    Arguments and errors as in `reference.linear_block_norm`; no gradient. Bits are those of the reference where sums are exact.
    """
    choice(activation, ACTIVATIONS, "activation")
    name = dtype_name(dtype, DTYPES, "dtype")
    if not isinstance(x, Quantized) or not isinstance(w, Quantized):
        check_linear_block_norm(x, w, weight, bias, block, eps)
    if any(part is not None for part in (x.outer, x.zero, w.outer, w.zero)):
        raise ValueError(
            "fast.linear_block_norm takes operands without outer scales and zero points; `reference.linear_block_norm` has them"
        )
    x, w = with_plain_scales(x), with_plain_scales(w)
    out = "" if scheme is None else record_name(scheme)
    values = (block, float(eps), activation, out, name, x.scheme.key, *settings(x), *settings(w))
    operands = (x.codes, x.scale, w.codes, w.scale, weight, bias)
    parts: list[torch.Tensor] = run(LINEAR_BLOCK_NORM, w.scheme, values, operands)
    like = torch.empty((x.shape[0], w.shape[0]), device="meta")
    return quantized_rows(parts, like, out, False) if out else parts[0]


def _operands_of(record: Any, values: Values, operands: Operands) -> tuple[Quantized, Quantized]:
    """x and w again."""
    codes, scale, w_codes, w_scale = operands[:4]
    x = stored(record_of(values[5]), values[6:10], (codes, scale, None, None))
    return x, stored(record, values[10:14], (w_codes, w_scale, None, None))


def linear_block_norm_op(
    codes: torch.Tensor,
    scale: torch.Tensor,
    w_codes: torch.Tensor,
    w_scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block: int,
    eps: float,
    activation: str,
    out: str,
    dtype: str,
    x_scheme: str,
    w_scheme: str,
    x_axis: int,
    w_axis: int,
) -> list[torch.Tensor]:
    """The result, or codes and scales."""
    sides = (tuple(codes.shape), x_axis, False, False, tuple(w_codes.shape), w_axis, False, False)
    values = (block, eps, activation, out, dtype, x_scheme, *sides)
    operands = (codes, scale, w_codes, w_scale, weight, bias)
    result: list[torch.Tensor] = execute(LINEAR_BLOCK_NORM, record_of(w_scheme), values, operands)
    return result


def _fake(
    codes: torch.Tensor, scale: Any, w_codes: torch.Tensor, w_scale: Any, weight: Any, bias: Any, block: int, eps: float,
    activation: str, out: str, dtype: str, x_scheme: str, w_scheme: str, x_axis: int, w_axis: int,
) -> list[torch.Tensor]:  # fmt: skip
    y = codes.new_empty((codes.shape[0], w_codes.shape[0]), dtype=getattr(torch, dtype))
    return fresh_rows(y, out, False) if out else [y]


def _operate(record: Any, values: Values, operands: Operands) -> list[torch.Tensor]:
    _check_bytes(values)
    result: list[torch.Tensor] = torch.ops.ao_lab.linear_block_norm(
        *operands, *values[:6], record_name(record), values[7], values[11]
    )
    return result


def _check_bytes(values: Values) -> None:
    if values[8] or values[12]:
        raise ValueError(
            "linear_block_norm in a compiled program takes a byte a code; quantize with packed=False"
        )


def _reference(record: Any, values: Values, operands: Operands) -> list[torch.Tensor]:
    block, eps, activation, out, dtype = values[:5]
    x, w = _operands_of(record, values, operands)
    y = reference.linear_block_norm(
        x, w, operands[4], bias=operands[5], block=block, eps=eps, activation=activation,
        scheme=constant_record(out) if out else None, dtype=dtype,
    )  # fmt: skip
    return [y.codes, y.scale, *([] if y.zero is None else [y.zero])] if out else [y]


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> list[torch.Tensor] | None:
    from fast.kernels.triton_scaled_mm import block_norm as host

    block, eps, activation, out, dtype = values[:5]
    x, w = _operands_of(record, values, operands)
    check_linear_block_norm(x, w, *operands[4:6], block, eps)
    if host.refusal(x, w, out, getattr(torch, dtype), block) is not None:
        return None
    parts = (x.codes, x.scale, w.codes, w.scale)
    if [part.dtype for part in parts] != [torch.uint8, torch.float32] * 2:
        return None  # the reference says what it takes
    if not all(part.is_contiguous() for part in parts):
        return None
    gain, bias = (None if one is None else one.float().contiguous() for one in operands[4:6])
    return host.linear_block_norm(
        x, w, gain, bias, eps, activation == "hard_swish", out, getattr(torch, dtype)
    )


NAMES = ("codes", "scale", "the weight's codes", "the weight's scale", "weight", "bias")
LINEAR_BLOCK_NORM = Function("linear_block_norm", NAMES, _reference, _operate, _kernel)
register("linear_block_norm", linear_block_norm_op, _fake)

__all__ = ["linear_block_norm"]
