"""`choose_scales`, `quantize` and `dequantize` for torch tensors, then kernel, reference and operator of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import PARTS, Function, execute, remember, require_tensor, run, scale_parts, settings
from fast.ops import constant_record, given_of, record_name, register
from reference import Quantized, Scales, Scheme
from reference.arrays.namespace import FLOAT_DTYPES, DTypeLike, dtype_name
from reference.formats.storage import packed_shape, storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import check_quantized, with_plain_scales, with_tiled_scales
from reference.quantize.scales import scale_groups
from reference.quantize.stored import check_tiled
from reference.schemes.schemes import record_of

# The quantizers below their signatures: kernel, reference and operator of each; see `fast.dispatch` and `fast.ops`.

Values = tuple[Any, ...]
Operands = Sequence[Any]


#: What needs no other spelling.
NAMED = frozenset([*FLOAT_DTYPES, *(getattr(torch, name) for name in FLOAT_DTYPES)])


def choose_scales(x: torch.Tensor, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x, as in `reference.choose_scales`, on x's device. No gradient flows through them."""
    scales: Scales = run(CHOOSE_SCALES, scheme, (axis,), (x,))
    return scales


def quantize(
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | torch.Tensor | None = None,
    random_bits: torch.Tensor | None = None,
    packed: bool = False,
    tiled: bool = False,
) -> Quantized:
    """x as codes and scales on its device, without gradient. Arguments, edges and errors as in `reference.quantize`.

    x may be the transposed view of a contiguous matrix: a kernel that turns tiles then makes 8-bit floats without a copy.
    """
    operands = (x,) if scales is None and random_bits is None else operands_of(x, scales, random_bits)
    function, operands = as_turned(operands, axis, tiled)
    q: Quantized = run(function, scheme, (axis, packed, tiled), operands)
    return q


def dequantize(q: Quantized, dtype: DTypeLike = "float32") -> torch.Tensor:
    """The tensor that q stands for, without gradient; dtype in any spelling. As in `reference.dequantize`."""
    if type(dtype) not in (str, torch.dtype) or dtype not in NAMED:
        dtype = dtype_name(dtype, FLOAT_DTYPES, "dtype")
    if not isinstance(q, Quantized):
        # The reference says what is wrong.
        result: Any = reference.dequantize(q, dtype)
        return require_tensor(result, "dequantize")
    require_tensor(q.codes, "dequantize")
    if q.tiled:
        check_quantized(q)
        q = with_plain_scales(q)
    y: torch.Tensor = run(DEQUANTIZE, q.scheme, (dtype, *settings(q)), (q.codes, q.scale, q.outer, q.zero))
    return y


def operands_of(x: Any, scales: Any, words: Any, keep_history: bool = False) -> tuple[Any, ...]:
    """The tensors of a call: fewer where neither scales nor random words are given. Scales lose their history, or keep it."""
    if scales is None and words is None:
        return (x,)
    scale, outer, zero = scale_parts(scales)
    if scale is None and outer is None and zero is None and scales is not None:
        scale = scales  # no scale at all: the reference says so
    if keep_history:
        return (x, scale, outer, zero, words)
    return (x, without_history(scale), without_history(outer), without_history(zero), words)


def without_history(part: Any) -> Any:
    """A tensor whose history is left out, where it has one."""
    return part.detach() if isinstance(part, torch.Tensor) and part.requires_grad else part


def given(operands: Operands) -> tuple[Any, Any]:
    """The scales and random words of a call's tensors."""
    return (None, None) if len(operands) == 1 else (given_of(*operands[1:4]), operands[4])


def parts_of(operands: Operands) -> tuple[Any, ...]:
    """Scale, outer scale, zero point and random words of a call's tensors."""
    return tuple(operands[1:]) if len(operands) > 1 else (None,) * 4


# choose_scales


def choose_scales_op(x: torch.Tensor, scheme: str, axis: int) -> list[torch.Tensor]:
    """Scale, outer scale and zero point, those that there are."""
    result = execute(CHOOSE_SCALES, record_of(scheme), (axis,), (x,))
    return [part for part in (result.scale, result.outer, result.zero) if part is not None]


def _choose_scales_fake(x: torch.Tensor, scheme: str, axis: int) -> list[torch.Tensor]:
    return fresh_scales(x, record_of(scheme), axis, True)


def _choose_scales(record: Any, values: Values, operands: Operands) -> Scales:
    name = record_name(record)
    parts = iter(torch.ops.ao_lab.choose_scales(operands[0], name, *values))
    return Scales(*(next(parts) if has else None for has in has_parts(constant_record(name))))


def _choose_scales_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.quantize import host

    return host.choose_scales(operands[0], record, *values, key)


CHOOSE_SCALES = Function(
    "choose_scales", ("x",), lambda r, v, o: reference.choose_scales(o[0], r, axis=v[0]), _choose_scales,
    _choose_scales_kernel,
)  # fmt: skip
register("choose_scales", choose_scales_op, _choose_scales_fake)

# quantize


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
    brought = (scale, outer, zero)
    operands = operands_of(x, given_of(*brought), random_bits)
    function, operands = as_turned(operands, axis, False)
    q = execute(function, record_of(scheme), (axis, packed, False), operands)
    fresh = [getattr(q, part) for part, one in zip(PARTS, brought, strict=True) if one is None]
    return [q.codes, *(part for part in fresh if part is not None)]


def _quantize_fake(
    x: torch.Tensor, scheme: str, axis: int, packed: bool, scale: Any, outer: Any, zero: Any, random_bits: Any
) -> list[torch.Tensor]:
    record = record_of(scheme)
    codes = fresh_codes(x, tuple(x.shape), record, packed)
    return [codes] if scale is not None else [codes, *fresh_scales(x, record, axis, outer is None)]


def fresh_codes(x: torch.Tensor, shape: tuple[int, ...], record: Scheme, packed: bool) -> torch.Tensor:
    """Empty codes of a tensor of some shape."""
    dtype = torch.uint8 if record.format.bits <= 8 else torch.uint16
    return x.new_empty(packed_shape(shape, record.format) if packed else shape, dtype=dtype)


def fresh_scales(
    x: torch.Tensor, record: Scheme, axis: int, with_outer: bool, shape: Any = None
) -> list[torch.Tensor]:
    """Empty scales, outer scales and zero points of x, or of a tensor of another shape."""
    blocks = Blocks.of(tuple(x.shape) if shape is None else shape, record.scale, axis)
    size = blocks.scale_shape
    result = [x.new_empty(size, dtype=getattr(torch, storage_dtype(record.scale.storage)))]
    if record.outer is not None and _is_double(record):
        result.append(
            x.new_empty(scale_groups(blocks, record.outer, record).scale_shape, dtype=torch.float32)
        )
        result.append(x.new_empty((), dtype=torch.float32))
    elif record.outer is not None and with_outer:
        result.append(x.new_empty((), dtype=torch.float32))
    if record.zero is not None:
        result.append(x.new_empty(size, dtype=getattr(torch, storage_dtype(record.zero.storage))))
    return result


def fresh_rows(x: torch.Tensor, scheme: str, packed: bool) -> list[torch.Tensor]:
    """Empty codes and scales of a tensor like x, along its last axis."""
    record = record_of(scheme)
    return [fresh_codes(x, tuple(x.shape), record, packed), *fresh_scales(x, record, -1, True)]


def _is_double(record: Scheme) -> bool:
    return record.outer is not None and record.outer.statistic != "absmax_elements"


def has_parts(record: Scheme) -> tuple[bool, bool, bool]:
    """Whether there is a scale, an outer scale, a zero point."""
    return (True, record.outer is not None, record.zero is not None or _is_double(record))


def _quantize(record: Any, values: Values, operands: Operands) -> Quantized:
    """Scales are tiled by torch operations."""
    axis, packed, tiled = values
    x, name = operands[0], record_name(record)
    scheme = constant_record(name)
    if tiled:
        check_tiled(scheme, tuple(x.shape), axis)
    *brought, words = parts_of(operands)
    result = torch.ops.ao_lab.quantize(x, name, axis, packed, *brought, words)
    q = quantized_of(scheme, result, tuple(x.shape), axis % max(x.dim(), 1), packed, brought)
    return with_tiled_scales(q) if tiled else q


def quantized_of(
    scheme: Scheme, made: Sequence[Any], shape: tuple[int, ...], axis: int, packed: bool, brought: Sequence[Any] = (None,) * 3
) -> Quantized:  # fmt: skip
    """A result of codes and of those scales that were not brought."""
    fresh = iter(made[1:])
    wanted = [has and brought[0] is None for has in has_parts(scheme)]
    stored = [
        one if one is not None else next(fresh) if want else None
        for one, want in zip(brought, wanted, strict=True)
    ]
    return Quantized(made[0], *stored, shape, axis, scheme, packed)


def quantized_rows(made: Sequence[Any], x: torch.Tensor, name: str, packed: bool) -> Quantized:
    """The same of a tensor like x, along its last axis, by the name of the scheme."""
    return quantized_of(constant_record(name), made, tuple(x.shape), max(x.dim() - 1, 0), packed)


def _quantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.quantize import host

    axis, packed, tiled = values
    return host.quantize(operands[0], record, axis, *given(operands), packed, tiled, key)


def _quantize_reference(record: Any, values: Values, operands: Operands) -> Quantized:
    scales, words = given(operands)
    axis, packed, tiled = values
    return reference.quantize(
        operands[0], record, axis=axis, scales=scales, random_bits=words, packed=packed, tiled=tiled
    )


def _quantize_host(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By a compiled loop, which calls like this one find by their key."""
    from fast.cpu.quantize import plan_of

    axis, packed, tiled = values
    if len(operands) > 1 or not isinstance(record, Scheme) or packed or tiled:
        return None
    plan = plan_of(operands[0], record, axis, codes=True)
    if plan is None:
        return None
    remember(key, plan.quantized, record)
    return plan.quantized(*operands)


GIVEN = ("x", "scale", "outer scale", "zero point", "random_bits")
QUANTIZE = Function("quantize", GIVEN, _quantize_reference, _quantize, _quantize_kernel, host=_quantize_host)
register("quantize", quantize_op, _quantize_fake)

# quantize the transpose of a matrix that lies in rows


def as_turned(operands: Operands, axis: int, tiled: bool) -> tuple[Function, Operands]:
    """`QUANTIZE` and its operands; for the transposed view of a contiguous matrix `QUANTIZE_TURNED` and that matrix.

    Keys of calls have no strides, so the two are told apart before one is made.
    """
    x = operands[0]
    if torch.compiler.is_compiling():
        return QUANTIZE, operands
    alone = len(operands) == 1 and not tiled and axis in (-1, 1) and isinstance(x, torch.Tensor)
    if not alone or x.layout is not torch.strided or x.is_nested or x.dim() != 2 or x.is_contiguous():
        return QUANTIZE, operands
    turned = x.t()
    return (QUANTIZE_TURNED, (turned,)) if turned.is_contiguous() else (QUANTIZE, operands)


def _turned_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By a kernel that turns tiles, otherwise of a copy."""
    from fast.kernels.rowwise_colwise.host import columns_only

    x = operands[0]
    result = columns_only(x, record, values[1], key)
    return execute(QUANTIZE, record, values, (x.t().contiguous(),)) if result is None else result


QUANTIZE_TURNED = Function(
    "quantize, of a transpose", ("x",), lambda r, v, o: execute(QUANTIZE, r, v, (o[0].t(),)),
    lambda r, v, o: _quantize(r, v, (o[0].t(),)), _turned_kernel,
)  # fmt: skip

# dequantize


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
    values = (dtype, tuple(shape), axis, packed, False)
    result: torch.Tensor = execute(DEQUANTIZE, record_of(scheme), values, (codes, scale, outer, zero))
    return result


def _dequantize_fake(
    codes: torch.Tensor, scale: Any, outer: Any, zero: Any, shape: list[int], axis: int, scheme: str, packed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return codes.new_empty(shape, dtype=dtype)


def _dequantize(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    dtype, *settings = values
    q = with_plain_scales(stored(record, settings, operands))
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    result: torch.Tensor = torch.ops.ao_lab.dequantize(
        q.codes, q.scale, q.outer, q.zero, list(q.shape), q.axis, record_name(q.scheme), q.packed, dtype
    )
    return result


def stored(record: Any, settings: Sequence[Any], parts: Sequence[Any]) -> Quantized:
    """A `Quantized` of its record, `cache.settings` and tensors."""
    shape, axis, packed, tiled = settings
    return Quantized(*parts, shape, axis, record, packed, tiled)


def _dequantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.quantize import host

    dtype, *settings = values
    return host.dequantize(stored(record, settings, operands), _name(dtype), key)


def _dequantize_reference(record: Any, values: Values, operands: Operands) -> Any:
    from fast.cpu.dequantize import dequantize as by_tiles

    dtype, *settings = values
    q, result = stored(record, settings, operands), None
    if isinstance(q.scheme, Scheme) and q.codes.device.type == "cpu":
        result = by_tiles(q, _name(dtype))
    return reference.dequantize(q, _name(dtype)) if result is None else result


def _dequantize_host(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By a compiled loop, which calls like this one find by their key."""
    from fast.cpu.prepared_dequantize import prepared

    dtype, *settings = values
    q = stored(record, settings, operands)
    call = prepared(q, _name(dtype)) if isinstance(q.scheme, Scheme) else None
    if call is None:
        return None
    remember(key, call, record)
    return call(*operands)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


DEQUANTIZE = Function(
    "dequantize",
    ("codes", *GIVEN[1:4]),
    _dequantize_reference,
    _dequantize,
    _dequantize_kernel,
    host=_dequantize_host,
)
register("dequantize", dequantize_op, _dequantize_fake)
