"""The product of inputs with a frozen, quantized weight, for autograd: what adapters are trained beside.

Forward is the product of the converted layer (`ao_lab.gemm.select`), the same bits. Backward: dx = g W where the input did not
saturate, 0 elsewhere, with the weight dequantized again. Kept for backward are the weight's stored parts, which the model has
anyway, and x only where its scheme can saturate.

Eager calls run `FrozenLinear`. What traces a program sees one operator of the weight, and below it one of the weight's parts:
a compiler that saw inside would keep the dense weight of forward for backward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ao_lab.gemm.select import product
from ao_lab.qat import transforms
from ao_lab.qat.backward import straight_through
from ao_lab.qat.forward import cannot_saturate
from ao_lab.tensor.metadata import PARTS, Meta, described, meta_from
from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from fast.device import functional_transform, is_traced
from fast.second_derivatives import once_differentiable


def needs_input(weight: QuantizedTensor) -> bool:
    """Whether the gradient of x depends on x: whether its scheme can saturate."""
    scheme = weight.recipe.activation
    return scheme is not None and (weight.input_scale is not None or not cannot_saturate(scheme))


def input_gradient(g: torch.Tensor, x: torch.Tensor | None, weight: QuantizedTensor) -> torch.Tensor:
    """dx of rows; x may be left out where `needs_input` says so."""
    dx = torch.mm(g.contiguous(), weight.dequantize(g.dtype))
    scheme = weight.recipe.activation
    return (
        dx
        if x is None or scheme is None
        else straight_through(dx, x, scheme, -1, weight.input_scales, None, None)[0]
    )


class FrozenLinear(torch.autograd.Function):
    """y of rows x; keeps no dense weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`product`."""
        ctx.save_for_backward(x if needs_input(weight) else None)
        # The model holds it, and nothing changes it: only a reference is kept.
        ctx.weight = weight
        return product(x, weight.transposed(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        """`input_gradient`, and a bias's."""
        (g,), (x,), need = grads, ctx.saved_tensors, ctx.needs_input_grad
        return input_gradient(g, x, ctx.weight) if need[0] else None, None, g.sum(0) if need[2] else None


@lru_cache(maxsize=256)
def _text(meta: Meta) -> str:
    return json.dumps(described(meta))


@lru_cache(maxsize=256)
def _meta(text: str) -> Meta:
    return meta_from(json.loads(text))


def _weight(parts: Sequence[torch.Tensor | None], shape: list[int], meta: str) -> QuantizedTensor:
    """The weight of an operator's arguments; schemas have no place for it as a whole."""
    return QuantizedTensor(dict(zip(PARTS, parts, strict=True)), _meta(meta), shape)


@torch.library.custom_op("ao_lab::frozen_parts", mutates_args=())
def frozen_parts_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    input_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: list[int],
    meta: str,
) -> torch.Tensor:
    """The product, of the weight's parts."""
    weight = _weight((codes, scale, outer, zero, input_scale, input_zero), shape, meta)
    return product(x, weight.transposed(), bias)


@frozen_parts_op.register_fake
def _fake(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], others[-2][0]))


@torch.library.custom_op("ao_lab::frozen_parts_backward", mutates_args=())
def frozen_parts_backward_op(
    g: torch.Tensor,
    x: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    input_zero: torch.Tensor | None,
    shape: list[int],
    meta: str,
) -> torch.Tensor:
    """`input_gradient`, of the weight's parts."""
    weight = _weight((codes, scale, outer, zero, input_scale, input_zero), shape, meta)
    return input_gradient(g, x, weight)


@frozen_parts_backward_op.register_fake
def _fake_backward(g: torch.Tensor, *others: Any) -> torch.Tensor:
    return g.new_empty((g.shape[0], others[-2][1]))


@torch.library.custom_op("ao_lab::frozen_linear", mutates_args=())
def frozen_linear_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of rows with a `QuantizedTensor`, whose table of operations answers instead of this."""
    raise TypeError("frozen_linear multiplies by a QuantizedTensor")


@torch.library.custom_op("ao_lab::frozen_linear_backward", mutates_args=())
def frozen_linear_backward_op(g: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    """`input_gradient`; as above."""
    raise TypeError("frozen_linear multiplies by a QuantizedTensor")


@operation(torch.ops.ao_lab.frozen_linear.default)
def _frozen_linear(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x, weight, bias = args
    result: torch.Tensor = torch.ops.ao_lab.frozen_parts(
        x, *weight.parts.values(), bias, list(weight.shape), _text(weight.meta)
    )
    return result


@operation(torch.ops.ao_lab.frozen_linear_backward.default)
def _frozen_linear_backward(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    g, x, weight = args
    result: torch.Tensor = torch.ops.ao_lab.frozen_parts_backward(
        g, x, *weight.parts.values(), list(weight.shape), _text(weight.meta)
    )
    return result


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x if needs_input(weight) else None, weight)


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    (x, weight), need = ctx.saved_tensors, ctx.needs_input_grad
    dx = torch.ops.ao_lab.frozen_linear_backward(g, x, weight) if need[0] else None
    return dx, None, g.sum(0) if need[2] else None


frozen_linear_op.register_autograd(_backward, setup_context=_keep)


def frozen_linear(rows: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Rows (M, K) times a frozen weight (N, K), plus a bias; differentiable in rows and bias.

    Under a transform of torch.func the dequantized operands are multiplied. TypeError where the weight is among what is
    transformed: it does not train.
    """
    found: object = weight
    if not isinstance(found, QuantizedTensor) and not is_traced(rows):
        raise TypeError(
            f"LoRA: the frozen quantized weight of shape {tuple(weight.shape)} is among the parameters that "
            f"{functional_transform() or 'a transform'} was given; give it those that train (requires_grad) alone"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        # It records one operator of the weight, as of layers that are quantized alone.
        return torch.nn.functional.linear(rows, weight, bias)
    if not torch.compiler.is_compiling() and functional_transform() is not None:
        scheme = weight.recipe.activation
        if scheme is not None:
            rows = transforms.rounded(rows, scheme, -1, weight.input_scales, rows.dtype, None)
        return torch.nn.functional.linear(rows, weight.dequantize(rows.dtype), bias)
    run: Any = torch.ops.ao_lab.frozen_linear if is_traced(rows) else FrozenLinear.apply
    y: torch.Tensor = run(rows, weight, bias)
    return y


__all__ = ["FrozenLinear", "frozen_linear"]
