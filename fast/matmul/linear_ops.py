"""`torch.library` operators of products by stored weights; see `ops`."""

from __future__ import annotations

from typing import Any

import torch

from fast.ops import record_name
from reference import Quantized
from reference.quantize.quantize import with_plain_scales
from reference.schemes.record_text import record_of


@torch.library.custom_op("ao_lab::linear", mutates_args=())
def linear_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: list[int],
    scheme: str,
    packed: bool,
) -> torch.Tensor:
    """Inputs times the transpose of the weight that codes and scales stand for."""
    import fast

    return fast.linear(
        x, Quantized(codes, scale, outer, zero, tuple(shape), 1, record_of(scheme), packed), bias
    )


@linear_op.register_fake
def _linear_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, bias: Any, shape: list[int], scheme: str, packed: bool
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], shape[0]))


@torch.library.custom_op("ao_lab::linear_pair", mutates_args=())
def linear_pair_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    codes2: torch.Tensor,
    scale2: torch.Tensor,
    outer2: torch.Tensor | None,
    zero2: torch.Tensor | None,
    shape: list[int],
    scheme: str,
    packed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs times the transposes of two weights of one shape and scheme."""
    from fast.matmul.linear_pair import linear_pair

    record, size = record_of(scheme), tuple(shape)
    first = Quantized(codes, scale, outer, zero, size, 1, record, packed)
    return linear_pair(x, first, Quantized(codes2, scale2, outer2, zero2, size, 1, record, packed))


@linear_pair_op.register_fake
def _linear_pair_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, codes2: Any, scale2: Any, outer2: Any, zero2: Any,
    shape: list[int], scheme: str, packed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    size = (*x.shape[:-1], shape[0])
    return x.new_empty(size), x.new_empty(size)


@torch.library.custom_op("ao_lab::linear_swiglu", mutates_args=())
def linear_swiglu_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    codes2: torch.Tensor,
    scale2: torch.Tensor,
    outer2: torch.Tensor | None,
    zero2: torch.Tensor | None,
    shape: list[int],
    scheme: str,
    packed: bool,
    scheme2: str,
    packed2: bool,
) -> torch.Tensor:
    """silu of the first product times the second, of two weights of one shape."""
    from fast.matmul.linear_swiglu import linear_swiglu

    gate = Quantized(codes, scale, outer, zero, tuple(shape), 1, record_of(scheme), packed)
    up = Quantized(codes2, scale2, outer2, zero2, tuple(shape), 1, record_of(scheme2), packed2)
    return linear_swiglu(x, gate, up)


@linear_swiglu_op.register_fake
def _linear_swiglu_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, codes2: Any, scale2: Any, outer2: Any, zero2: Any,
    shape: list[int], scheme: str, packed: bool, scheme2: str, packed2: bool,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], shape[0]))


@torch.library.custom_op("ao_lab::linear_of_codes", mutates_args=())
def linear_of_codes_op(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scheme: str,
    scheme: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One row of codes times the transpose of a weight of codes."""
    from fast.matmul.linear import linear_of_codes

    left = Quantized(x, x_scale, None, x_zero, tuple(x.shape), 1, record_of(x_scheme))
    w = Quantized(codes, scale, None, None, tuple(codes.shape), 1, record_of(scheme))
    return linear_of_codes(left, w, bias, dtype=dtype)


@linear_of_codes_op.register_fake
def _linear_of_codes_fake(
    x: torch.Tensor, x_scale: Any, x_zero: Any, codes: torch.Tensor, scale: Any, bias: Any, x_scheme: str, scheme: str,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=dtype)


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """`fast.linear`, recorded."""
    q = with_plain_scales(w)
    made: torch.Tensor = linear_op(
        x, q.codes, q.scale, q.outer, q.zero, bias, list(q.shape), record_name(q.scheme), q.packed
    )
    return made


def linear_pair(x: torch.Tensor, first: Quantized, second: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """`fast.linear_pair.linear_pair`, recorded."""
    a, b = with_plain_scales(first), with_plain_scales(second)
    made: tuple[torch.Tensor, torch.Tensor] = linear_pair_op(
        x, *_parts(a, b), list(a.shape), record_name(a.scheme), a.packed
    )
    return made


def linear_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized) -> torch.Tensor:
    """`fast.linear_swiglu`, recorded."""
    a, b = with_plain_scales(gate), with_plain_scales(up)
    stored = record_name(a.scheme), a.packed, record_name(b.scheme), b.packed
    made: torch.Tensor = linear_swiglu_op(x, *_parts(a, b), list(a.shape), *stored)
    return made


def _parts(*weights: Quantized) -> list[torch.Tensor | None]:
    """What weights consist of, one after the other."""
    return [part for w in weights for part in (w.codes, w.scale, w.outer, w.zero)]


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`fast.linear.linear_of_codes`, recorded."""
    made: torch.Tensor = linear_of_codes_op(
        x.codes, x.scale, x.zero, w.codes, w.scale, bias, record_name(x.scheme), record_name(w.scheme), dtype
    )
    return made


__all__ = ["linear", "linear_of_codes", "linear_pair", "linear_swiglu"]
