"""`swiglu` and `swiglu_quantize` for torch tensors; see `reference.swiglu` for the rules.

The gradient is `swiglu_vjp`, no name of `fast` itself: autograd calls it. Its own gradients, which second derivatives ask for,
are those of the formula in float32. Values of a call are the strides of its tensors, by which kernels read rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.ops import no_gradient, record_name, register, strides
from fast.quantize.quantize import QUANTIZE, fresh_rows, quantized_rows
from reference import Quantized, Scheme
from reference.layers import swiglu as specified_swiglu
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]
Pair = tuple[torch.Tensor, torch.Tensor]
PARTS = ("codes", "scale", "outer", "zero")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up on gate's device; differentiable. Arguments, edges and errors as in `reference.swiglu`.

    gate and up may be halves of one matrix: rows are read where they lie.
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


def swiglu_vjp(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """(dgate, dup) on gate's device; edges and errors as in `reference.layers.swiglu.swiglu_vjp`.

    gate and up may be halves of one matrix: rows are read where they lie.
    """
    result: Pair = run(SWIGLU_VJP, None, strides(g, gate, up), (g, gate, up))
    return result


def swiglu_op(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    result: torch.Tensor = execute(SWIGLU, None, strides(gate, up), (gate, up))
    return result


def _save_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return swiglu_vjp(g, *ctx.saved_tensors)


def _swiglu_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import swiglu

    return swiglu.swiglu(*operands, key)


SWIGLU = Function(
    "swiglu", ("gate", "up"), lambda r, v, o: reference.swiglu(*o),
    lambda r, v, o: SWIGLU_OP(*o), _swiglu_kernel, differentiable=True,
)  # fmt: skip
SWIGLU_OP = register(
    "swiglu", swiglu_op, lambda gate, up: gate.new_empty(gate.shape), _swiglu_backward, _save_swiglu
)


def swiglu_quantize_op(gate: torch.Tensor, up: torch.Tensor, scheme: str, packed: bool) -> list[torch.Tensor]:
    """Codes, scale, outer scale and zero point, those that there are."""
    q = execute(SWIGLU_QUANTIZE, record_of(scheme), (packed, *strides(gate, up)), (gate, up))
    return [part for part in (getattr(q, name) for name in PARTS) if part is not None]


def _swiglu_quantize(record: Any, values: Values, operands: Operands) -> Quantized:
    name = record_name(record)
    return quantized_rows(
        torch.ops.ao_lab.swiglu_quantize(*operands, name, values[0]), operands[0], name, values[0]
    )


def _swiglu_quantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """In one kernel where blocks lie in rows; otherwise multiplied, and then quantized."""
    from fast.kernels.layers import swiglu

    result = swiglu.swiglu_quantize(*operands, record, values[0], key)
    if result is not None:
        return result
    y = execute(SWIGLU, None, values[1:], operands)
    return execute(QUANTIZE, record, (-1, values[0], False), (y,))


SWIGLU_QUANTIZE = Function(
    "swiglu_quantize", ("gate", "up"), lambda r, v, o: reference.swiglu_quantize(*o, r, packed=v[0]),
    _swiglu_quantize, _swiglu_quantize_kernel,
)  # fmt: skip
register(
    "swiglu_quantize", swiglu_quantize_op, lambda gate, up, scheme, packed: fresh_rows(gate, scheme, packed),
    no_gradient("swiglu_quantize", "its results are codes; use swiglu, and fake_quantize"),
)  # fmt: skip


def swiglu_vjp_op(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """dgate and dup."""
    return list(execute(SWIGLU_VJP, None, strides(g, gate, up), (g, gate, up)))


def _swiglu_vjp_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import swiglu

    return swiglu.swiglu_vjp(*operands, key)


def _swiglu_formula(g: Any, gate: Any, up: Any) -> Pair:
    """With s the sigmoid of gate: dgate = g up s (1 + gate (1 - s)), dup = g gate s."""
    wide, v = g.float(), gate.float()
    s = torch.sigmoid(v)
    return (wide * up.float() * s * (1 + v * (1 - s))).to(gate.dtype), (wide * v * s).to(up.dtype)


def _save_swiglu_vjp(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_second(ctx: Any, grads: Any) -> Any:
    """Gradients of g, gate and up, by the formula."""
    return torch.func.vjp(_swiglu_formula, *ctx.saved_tensors)[1](tuple(grads))


SWIGLU_VJP = Function(
    "swiglu_vjp", ("g", "gate", "up"), lambda r, v, o: specified_swiglu.swiglu_vjp(*o),
    lambda r, v, o: tuple(SWIGLU_VJP_OP(*o)), _swiglu_vjp_kernel, differentiable=True,
)  # fmt: skip
SWIGLU_VJP_OP = register(
    "swiglu_vjp", swiglu_vjp_op, lambda g, gate, up: [gate.new_empty(gate.shape), gate.new_empty(gate.shape)],
    _swiglu_second, _save_swiglu_vjp,
)  # fmt: skip


__all__ = ["SWIGLU", "swiglu", "swiglu_quantize", "swiglu_vjp"]
