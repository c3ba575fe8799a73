"""`torch.library` operators of the functions here, for what traces a program: torch.compile, export, opcheck.

Those of products are in `linear_ops`.

Eager calls do not go through them: dispatching a custom operator takes as long as a small kernel runs. Under a tracer the
public functions of `fast` call these operators, whose fake implementations know shapes and dtypes. A scheme travels by
name, a record of one's own (`dataclasses.replace`) with all its fields, so that a saved program runs in another process.
"""

from __future__ import annotations

from typing import Any

import torch

from reference import Quantized, Scales
from reference.formats.pack import packed_shape
from reference.formats.storage import storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import with_plain_scales, with_tiled_scales
from reference.quantize.scales import scale_groups
from reference.quantize.tiled_scales import check_tiled
from reference.schemes.record_text import record_of
from reference.schemes.schemes import Scheme

PARTS = ("scale", "outer", "zero")


def record_name(scheme: str | Scheme) -> str:
    """The text that stands for a scheme in an operator's arguments."""
    return scheme if isinstance(scheme, str) else scheme.key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant_record(name: str) -> Scheme:
    """The record of a name, while a program is traced."""
    return record_of(name)


@torch.library.custom_op("ao_lab::quantize", mutates_args=())
def quantize_op(
    x: torch.Tensor,
    scheme: str,
    axis: int,
    packed: bool,
    scale: torch.Tensor | None,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    random_bits: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Codes, and those of scale, outer and zero that were not given."""
    import fast

    given = None if scale is None and outer is None and zero is None else Scales(scale, outer, zero)
    q = fast.quantize(x, record_of(scheme), axis=axis, scales=given, random_bits=random_bits, packed=packed)
    fresh = [
        getattr(q, part) for part, brought in zip(PARTS, (scale, outer, zero), strict=True) if brought is None
    ]
    return [q.codes, *(part for part in fresh if part is not None)]


@quantize_op.register_fake
def _quantize_fake(
    x: torch.Tensor, scheme: str, axis: int, packed: bool, scale: Any, outer: Any, zero: Any, random_bits: Any
) -> list[torch.Tensor]:
    record = record_of(scheme)
    shape = packed_shape(tuple(x.shape), record.format) if packed else tuple(x.shape)
    made = [x.new_empty(shape, dtype=torch.uint8 if record.format.bits <= 8 else torch.uint16)]
    if scale is None:
        made += _fresh_scales(x, record, axis, outer is None)
    return made


def _fresh_scales(x: torch.Tensor, record: Scheme, axis: int, with_outer: bool) -> list[torch.Tensor]:
    """Empty scales, outer scales and zero points of x."""
    blocks = Blocks.of(tuple(x.shape), record.scale, axis)
    shape, double = (
        blocks.scale_shape,
        record.outer is not None and record.outer.statistic != "absmax_elements",
    )
    made = [x.new_empty(shape, dtype=getattr(torch, storage_dtype(record.scale.storage)))]
    if record.outer is not None and double:
        made.append(x.new_empty(scale_groups(blocks, record.outer, record).scale_shape, dtype=torch.float32))
        made.append(x.new_empty((), dtype=torch.float32))
    elif record.outer is not None and with_outer:
        made.append(x.new_empty((), dtype=torch.float32))
    if record.zero is not None:
        made.append(x.new_empty(shape, dtype=getattr(torch, storage_dtype(record.zero.storage))))
    return made


@torch.library.custom_op("ao_lab::dequantize", mutates_args=())
def dequantize_op(
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    shape: list[int],
    axis: int,
    scheme: str,
    packed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The tensor that codes and scales stand for."""
    import fast

    q = Quantized(codes, scale, outer, zero, tuple(shape), axis, record_of(scheme), packed)
    return fast.dequantize(q, dtype)


@dequantize_op.register_fake
def _dequantize_fake(
    codes: torch.Tensor, scale: Any, outer: Any, zero: Any, shape: list[int], axis: int, scheme: str, packed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return codes.new_empty(shape, dtype=dtype)


@torch.library.custom_op("ao_lab::fake_quantize", mutates_args=())
def fake_quantize_op(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    scheme: str,
    axis: int,
    random_bits: torch.Tensor | None,
) -> torch.Tensor:
    """x rounded to what its scheme represents."""
    from fast.quantize.fake_quantize import forward

    return forward(x, record_of(scheme), axis, given_of(scale, outer, zero), random_bits).clone()


@fake_quantize_op.register_fake
def _fake_quantize_fake(
    x: torch.Tensor, scale: Any, outer: Any, zero: Any, scheme: str, axis: int, random_bits: Any
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("ao_lab::fake_quantize_vjp", mutates_args=())
def fake_quantize_vjp_op(
    g: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    scheme: str,
    axis: int,
    random_bits: torch.Tensor | None,
) -> list[torch.Tensor]:
    """dx, and for given scales dscale and dzero where there is a zero point."""
    import fast

    made = fast.fake_quantize_vjp(
        g, x, record_of(scheme), axis=axis, scales=given_of(scale, outer, zero), random_bits=random_bits
    )
    return [part for part in made if part is not None]


@fake_quantize_vjp_op.register_fake
def _fake_quantize_vjp_fake(
    g: torch.Tensor,
    x: torch.Tensor,
    scale: Any,
    outer: Any,
    zero: Any,
    scheme: str,
    axis: int,
    random_bits: Any,
) -> list[torch.Tensor]:
    made = [torch.empty_like(x, memory_format=torch.contiguous_format)]
    if scale is not None:
        made.append(torch.empty_like(scale, dtype=torch.float32))
        if record_of(scheme).zero is not None:
            made.append(torch.empty_like(scale, dtype=torch.float32))
    return made


def given_of(scale: Any, outer: Any, zero: Any) -> Scales | None:
    """Scales of parts; None where there is no part."""
    return None if scale is None and outer is None and zero is None else Scales(scale, outer, zero)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, scale, outer, zero, scheme, axis, random_bits = inputs
    ctx.save_for_backward(x, scale, outer, zero, random_bits)
    ctx.scheme, ctx.axis = scheme, axis


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    x, scale, outer, zero, words = ctx.saved_tensors
    made = torch.ops.ao_lab.fake_quantize_vjp(g, x, scale, outer, zero, ctx.scheme, ctx.axis, words)
    wanted = ctx.needs_input_grad
    dscale = made[1] if scale is not None and wanted[1] else None
    dzero = made[2] if zero is not None and wanted[3] and len(made) > 2 else None
    return made[0], dscale, None, dzero, None, None, None


fake_quantize_op.register_autograd(_backward, setup_context=_save)


def quantize(
    x: torch.Tensor, scheme: Any, axis: int, scales: Any, random_bits: Any, packed: bool, tiled: bool = False
) -> Quantized:
    """`fast.quantize` as an operator; scales are tiled by torch operations."""
    name = record_name(scheme)
    record = constant_record(name)
    if tiled:
        check_tiled(record, tuple(x.shape), axis)
    given = scales if isinstance(scales, Scales) or scales is None else Scales(scales)
    parts = (None, None, None) if given is None else (given.scale, given.outer, given.zero)
    made = torch.ops.ao_lab.quantize(x, name, axis, packed, *parts, random_bits)
    fresh = iter(made[1:])
    kinds = (True, record.outer is not None, record.zero is not None or _double(record))
    kept = [
        brought
        if brought is not None
        else next(fresh)
        if has and (given is None or given.scale is None)
        else None
        for brought, has in zip(parts, kinds, strict=True)
    ]
    q = Quantized(made[0], *kept, tuple(x.shape), axis % max(x.dim(), 1), record, packed)
    return with_tiled_scales(q) if tiled else q


def _double(record: Scheme) -> bool:
    return record.outer is not None and record.outer.statistic != "absmax_elements"


def dequantize(q: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """`fast.dequantize` as an operator."""
    q = with_plain_scales(q)
    made: torch.Tensor = torch.ops.ao_lab.dequantize(
        q.codes, q.scale, q.outer, q.zero, list(q.shape), q.axis, record_name(q.scheme), q.packed, dtype
    )
    return made


def fake_quantize(x: torch.Tensor, scheme: Any, axis: int, scales: Any, random_bits: Any) -> torch.Tensor:
    """`fast.fake_quantize` as an operator."""
    given = scales if isinstance(scales, Scales) or scales is None else Scales(scales)
    parts = (None, None, None) if given is None else (given.scale, given.outer, given.zero)
    made: torch.Tensor = torch.ops.ao_lab.fake_quantize(x, *parts, record_name(scheme), axis, random_bits)
    return made


__all__ = ["dequantize", "fake_quantize", "quantize"]
