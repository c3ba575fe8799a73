"""What operators of products by stored weights share: how a weight travels, its dense form, gradients.

An operator takes the tensors of a weight (`TENSORS`), and its shape, scheme and packing as plain arguments. Gradients of inputs
are products with the dequantized weight in the inputs' dtype, those of a bias the sums over rows. A stored weight has none: a
call with scales that require a gradient is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fast.dispatch import execute
from fast.launch.cache import settings
from fast.matmul.weights import parts, plain
from fast.quantize.ops import DEQUANTIZE
from reference import Quantized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Values = tuple[Any, ...]
Operands = Sequence[Any]
#: What the tensors of a weight are called in messages.
STORED = ("codes", "scale", "outer scale", "zero point")
TWO = tuple(f"{part} of the {which} weight" for which in ("first", "second") for part in STORED)
#: Tensors of a weight in an operator's schema, and how they are stored.
TENSORS = "Tensor codes, Tensor scale, Tensor? outer, Tensor? zero"
SECOND_TENSORS = "Tensor codes2, Tensor scale2, Tensor? outer2, Tensor? zero2"
FORM = "SymInt[] shape, str scheme, bool packed"


def dense(w: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """The weight in a dtype."""
    w = plain(w)
    values: torch.Tensor = execute(DEQUANTIZE, w.scheme, (dtype, *settings(w)), parts(w))
    return values


def refuse_scale_gradients(ctx: Any, name: str, *inputs: int) -> None:
    """NotImplementedError where one of these inputs, parts of weights, requires a gradient."""
    if any(ctx.needs_input_grad[at] for at in inputs):
        raise NotImplementedError(
            f"fast.{name} has no gradient for the scales of a stored weight: detach them, or learn them with fake_quantize"
        )


def times_weight(
    g: torch.Tensor, stored: Sequence[Any], shape: Sequence[int], scheme: str, packed: bool
) -> torch.Tensor:
    """g (..., N) times a weight (N, K), by operators."""
    values = torch.ops.ao_lab.dequantize(*stored, list(shape), 1, scheme, packed, g.dtype)
    return g @ values


def has_float_inputs(*tensors: Any) -> bool:
    """Whether inputs and bias, where there is one, have dtypes that kernels and torch multiply as the reference does."""
    return all(t is None or t.dtype in FLOATS for t in tensors)


def save_pair(name: str) -> Callable[..., None]:
    """What the gradient of a product of x and two weights needs: x, their tensors, and how they are stored."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        refuse_scale_gradients(ctx, name, 2, 3, 4, 6, 7, 8)
        ctx.save_for_backward(*inputs[:9])
        ctx.stored = inputs[9:]

    return save
