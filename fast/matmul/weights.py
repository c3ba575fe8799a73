"""Stored weights and codes as operands of products: taken apart for `dispatch.run`, put together again, and checked.

What operators of products by stored weights share: how a weight travels, its dense form, gradients.

An operator takes the tensors of a weight (`TENSORS`), and its shape, scheme and packing as plain arguments. Gradients of inputs
are products with the dequantized weight in the inputs' dtype, those of a bias the sums over rows. A stored weight has none: a
call with scales that require a gradient is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fast.dispatch import execute, require_tensor, settings
from fast.quantize.quantize import DEQUANTIZE
from reference import Quantized, Scheme
from reference.matmul.linear import check_linear
from reference.quantize.quantize import check_quantized, with_plain_scales
from reference.schemes.schemes import record_of

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


def save_pair(name: str) -> Callable[..., None]:
    """What the gradient of a product of x and two weights needs: x, their tensors, and how they are stored."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        refuse_scale_gradients(ctx, name, 2, 3, 4, 6, 7, 8)
        ctx.save_for_backward(*inputs[:9])
        ctx.stored = inputs[9:]

    return save


#: Longest sum whose int32 accumulator cannot overflow: 2**31 / (255 * 128).
LONGEST_INT8 = 65536
#: Elements that are multiplied as codes, and by what they can be.
MULTIPLIED = {"int8": ("int8",), **dict.fromkeys(*[("float8_e4m3fn", "float8_e5m2")] * 2)}


def parts(*weights: Quantized) -> tuple[Any, ...]:
    """What weights consist of, one after the other."""
    return tuple(part for w in weights for part in (w.codes, w.scale, w.outer, w.zero))


def weight_of(record: Any, stored: Sequence[Any], tensors: Sequence[Any]) -> Quantized:
    """A weight of its record, `cache.settings` and tensors."""
    shape, axis, packed, tiled = stored
    return Quantized(*tensors, shape, axis, record, packed, tiled)


def plain(w: Quantized) -> Quantized:
    """The weight as operators take it: its scales in their own shape."""
    return with_plain_scales(w) if w.tiled else w


def pair_values(first: Quantized, second: Quantized) -> tuple[Any, ...]:
    """The plain values of a call with two weights. A key has the id of one record: the other one travels by name."""
    return (second.scheme.key, *settings(first), *settings(second))


def pair_of(record: Any, values: Sequence[Any], operands: Sequence[Any]) -> tuple[Quantized, Quantized]:
    """The weights of `pair_values`; operands: their parts."""
    first = weight_of(record, values[1:5], operands[:4])
    return first, weight_of(record_of(values[0]), values[5:], operands[4:])


def require_weights(x: Any, name: str, *weights: Any) -> None:
    """TypeError where a weight is not `Quantized`; of the inputs first, where those are no tensor."""
    for w in weights:
        if not isinstance(w, Quantized):
            check_weight(require_tensor(x, name), w, None, name)


def check_weight(x: Any, w: Any, bias: Any, name: str) -> None:
    """Raise as `linear` does where shapes do not go together, and where the weight holds no tensors."""
    check_linear(x, w, bias)
    if not isinstance(w.codes, torch.Tensor):
        raise TypeError(f"fast.{name} takes weights of torch tensors, got {type(w.codes).__name__}")
    # A program that is compiled is checked when its operator runs.
    if not torch.compiler.is_compiling() and not has_symbolic_sizes(w):
        check_quantized(w)


def has_symbolic_sizes(w: Quantized) -> bool:
    """Whether a compiler traces a weight of any size: codes and scales have symbols of their own then, which compare
    unequal."""
    tensors = [part for part in (w.codes, w.scale, w.outer, w.zero) if isinstance(part, torch.Tensor)]
    sizes = [size for shape in (w.shape, *(part.shape for part in tensors)) for size in shape]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def alike(first: Quantized, second: Quantized) -> bool:
    """Whether two weights are stored in one way: scheme, shape, axis, packed or not, scales plain."""
    stored = [(w.scheme.key, tuple(w.shape), w.axis, w.packed) for w in (first, second)]
    return stored[0] == stored[1] and not (first.tiled or second.tiled)


def check_codes(x: Quantized, w: Quantized, extra: bool = False) -> None:
    """Raise as `linear_of_codes` does where the operands are not what it multiplies. extra: they have outer scales, or the
    weight a zero point."""
    element, other = x.scheme.element, w.scheme.element
    if len(x.shape) != 2:
        raise ValueError(
            f"linear_of_codes takes inputs in rows (M, K), got {tuple(x.shape)}; reshape them, or `linear` takes others, "
            f"dequantized"
        )
    if other not in MULTIPLIED.get(element, ()):
        raise ValueError(
            f"linear_of_codes multiplies int8 by int8 and float8 by float8, got {element} and {other}"
        )
    if not (one_scale(x.scheme) and one_scale(w.scheme)) or extra or x.axis != 1:
        raise ValueError(
            f"linear_of_codes takes one float32 scale for each row or in all, and no zero point of the weight, got "
            f"{x.scheme.name} along axis {x.axis} and {w.scheme.name}; `linear` takes such weights"
        )
    if element == "int8" and w.shape[1] > LONGEST_INT8:
        raise ValueError(
            f"linear_of_codes: sums of {w.shape[1]} products, longer than {LONGEST_INT8}, may overflow int32"
        )


def one_scale(scheme: Scheme) -> bool:
    """Whether every row has one float32 scale that multiplies codes, and nothing else but a zero point."""
    scale = scheme.scale
    stored = scale.storage == "float32" and scale.stored == "decode" and scheme.outer is None
    return (
        stored
        and scale.block in (-1, "tensor")
        and scheme.dequantize != "target"
        and (scheme.zero is None or scheme.zero.rule == "code")
    )
