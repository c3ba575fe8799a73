"""`torch.vmap` over layers whose inputs share a scale among rows: one example after the other, each under scales of its own.

vmap puts the rows of all examples into one matrix. That is right where every row has its own scales. A scheme with one scale
for the tensor, or with an outer one, would find it over all examples, so that what one of them gives depends on the others.
Such a layer is computed example by example here; other products than F.linear, and weights that are stacked, are refused.

Tangents (`torch.func.jvp`, `jacfwd`) are multiplied by the weight as they are, as gradients are: the layer's own operations
would round them, and a derivative would be no linear function of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ao_lab.tensor.op_registry import transformed_function
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from reference import Scheme

VMAP = "torch._functorch.vmap"
#: Products that have no rule of their own.
PRODUCTS = (
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.mv, torch.Tensor.matmul, torch.Tensor.mm,
    torch.Tensor.bmm, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__,
)  # fmt: skip
_functorch = torch._C._functorch


def shares_scales(weight: QuantizedTensor) -> bool:
    """Whether rows of a layer's input share a scale that is found anew for each input."""
    scheme, scales = weight.recipe.activation, weight.input_scales
    if scheme is None or (scales is not None and (scales.scale is not None or scales.outer is not None)):
        return False
    return scheme.outer is not None or not _is_in_a_row(scheme)


def _is_in_a_row(scheme: Scheme) -> bool:
    """Whether a block of an input holds elements of one row."""
    return isinstance(scheme.scale.block, int)


def wrappers_of(value: Any) -> Iterator[torch.Tensor]:
    """What transforms that are running have made of a tensor, the last one first."""
    while isinstance(value, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(value):
        yield value
        value = _functorch.get_unwrapped(value)


def is_batched(value: Any) -> bool:
    """Whether a vmap that is running maps over a tensor, below other transforms too."""
    return any(map(_functorch.is_batchedtensor, wrappers_of(value)))


def may_have_tangent(value: Any) -> bool:
    """Whether a derivative of a function, forward or backward, is taken at a tensor."""
    if not isinstance(value, torch.Tensor):
        return False
    wrapped = [*wrappers_of(value)]
    if any(map(_functorch.is_gradtrackingtensor, wrapped)):
        return True
    if forward_ad._current_level < 0:
        return False
    plain = _functorch.get_unwrapped(wrapped[-1]) if wrapped else value
    unpacked: Any = forward_ad.unpack_dual(plain)  # type: ignore[no-untyped-call]
    return unpacked.tangent is not None


class _Held:
    """A weight that no transform wraps: it is the same for all examples."""

    def __init__(self, weight: QuantizedTensor) -> None:
        self.weight = weight


class LinearByExample(torch.autograd.Function):
    """F.linear of x (..., K), a weight (N, K) and a bias (N) or None; its vmap calls it once for each example."""

    @staticmethod
    def forward(x: torch.Tensor, held: _Held, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer of one example, or of inputs that are the same for all."""
        return torch.nn.functional.linear(x, held.weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Gradients read the weight alone."""
        ctx.held = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        """As the layer's own: inputs are taken as they are."""
        x = torch.matmul(g, ctx.held.weight.dequantize(g.dtype)) if ctx.needs_input_grad[0] else None
        bias = g.reshape(-1, g.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return x, None, bias

    @staticmethod
    def jvp(ctx: Any, x: Any, held: Any, bias: Any) -> torch.Tensor:
        """Of tangents of x and of the bias, either of which may be None: those of the layer as it is, without rounding."""
        y = torch.nn.functional.linear(x, ctx.held.weight.dequantize(x.dtype)) if x is not None else None
        return bias if y is None else y if bias is None else y + bias

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Any, held: _Held, bias: Any) -> Any:
        """The results (batch, ..., N) of the examples: one after the other, or at once where rows have their own scales."""
        if in_dims[2] is None and not shares_scales(held.weight):
            return LinearByExample.apply(x.movedim(in_dims[0], 0), held, bias), 0  # type: ignore[no-untyped-call]
        samples = (
            [
                one if dim is None else one.select(dim, at)
                for one, dim in ((x, in_dims[0]), (bias, in_dims[2]))
            ]
            for at in range(info.batch_size)
        )
        return torch.stack([LinearByExample.apply(one, held, b) for one, b in samples]), 0  # type: ignore[no-untyped-call]


@transformed_function(torch.nn.functional.linear)
def linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """F.linear under a transform; None where the weight's own operation is right."""
    if not isinstance(weight, QuantizedTensor) or weight.recipe.activation is None:
        return None
    if not (may_have_tangent(input) or (shares_scales(weight) and is_batched(input))):
        return None
    result: torch.Tensor = LinearByExample.apply(input, _Held(weight), bias)  # type: ignore[no-untyped-call]
    return result


@transformed_function(*PRODUCTS)
def other_product(*args: Any, **kwargs: Any) -> None:
    """ValueError for what would find one scale over all examples; None for other products."""
    for weight in args:
        if isinstance(weight, QuantizedTensor) and any(map(is_batched, args)) and shares_scales(weight):
            raise ValueError(_message(weight, "supports only F.linear under torch.vmap"))


def _message(weight: QuantizedTensor, what: str) -> str:
    return (
        f"{weight!r} {what}: its inputs have one scale for all tokens, which must not be shared by several examples. Call it "
        f"for one example at a time, or quantize inputs with a scale for each token (PerRow)"
    )


def refuse_stacked() -> None:
    """Let vmap map over no weights whose inputs share scales: it multiplies all of them at once."""
    module: Any = sys.modules[VMAP]
    plain = module._add_batch_dim

    def add(tensor: Any, *args: Any) -> Any:
        if isinstance(tensor, QuantizedTensor) and shares_scales(tensor):
            raise ValueError(_message(tensor, "is mapped over by torch.vmap"))
        return plain(tensor, *args)

    module._add_batch_dim = add


refuse_stacked()
__all__ = ["LinearByExample", "is_batched", "linear", "may_have_tangent", "other_product", "shares_scales"]
