"""A matrix's blocks along rows and along columns at once: codes (`quantize_both`), values, or values and codes.

From one read where a kernel does that (`fast.kernels.rowwise_colwise`, `fast.kernels.both_axes`), otherwise from two: the same
bits. `both_values` and `values_and_codes` are operands of training products, and no names of `fast` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import PARTS, Function, execute, run
from fast.ops import constant_record, given_of, record_name, register
from fast.quantize.fake_quantize import FAKE_QUANTIZE
from fast.quantize.quantize import (
    GIVEN,
    QUANTIZE,
    Operands,
    Values,
    as_turned,
    fresh_codes,
    fresh_scales,
    has_parts,
    operands_of,
    quantized_of,
)
from reference import Quantized, Scheme
from reference.quantize.quantize import with_tiled_scales
from reference.quantize.stored import check_tiled
from reference.schemes.schemes import record_of

Pair = tuple[torch.Tensor, torch.Tensor]
#: Plain values of `quantize` along columns: neither packed nor tiled.
CODES_DOWN = (0, False, False)


def quantize_both(
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Any = None,
    random_bits: Any = None,
    packed: bool = False,
    tiled: bool = False,
) -> tuple[Quantized, Quantized]:
    """x along its last axis, and x.T along its last axis: arguments, edges and errors as in `reference.quantize_both`.

    On a GPU blocks of 8-bit floats (MX, groups, squares) and a given pair of scales of the tensor read x once; scales of rows
    or of the tensor read it twice. Everything else is quantized twice.
    """
    given, one_scale = _given(scales, random_bits)
    result: tuple[Quantized, Quantized] = run(QUANTIZE_BOTH, scheme, (packed, tiled, one_scale), (x, *given))
    return result


def _given(scales: Any, random_bits: Any) -> tuple[tuple[Any, ...], bool]:
    """The tensors after x, none where nothing is given; and whether both scales are one tensor, which a kernel reads once."""
    if scales is None and random_bits is None:
        return (), False
    pairs = (_pair(scales, "scales"), _pair(random_bits, "random_bits"))
    rows, columns = (operands_of(None, *side) for side in zip(*pairs, strict=True))
    rows, columns = (side[1:] or (None,) * 4 for side in (rows, columns))
    words = () if random_bits is None else (rows[3], columns[3])
    return (*rows[:3], *columns[:3], *words), rows[0] is columns[0]


def _pair(value: Any, what: str) -> Any:
    """A pair, (None, None) for None; the TypeError of the reference otherwise."""
    if value is not None and (not isinstance(value, (tuple, list)) or len(value) != 2):
        raise TypeError(
            f"{what} is None or a pair, for x along its rows and for x.T; got {type(value).__name__}"
        )
    return (None, None) if value is None else value


def quantize_both_op(
    x: torch.Tensor, scheme: str, packed: bool, given: list[torch.Tensor | None], one_scale: bool
) -> list[torch.Tensor]:
    """Codes and the scales that were not given, along rows and then along columns. given: the operands after x."""
    pair = execute(QUANTIZE_BOTH, record_of(scheme), (packed, False, one_scale), (x, *given))
    result = []
    for q, brought in zip(pair, by_axis(given), strict=True):
        fresh = [getattr(q, part) for part, one in zip(PARTS, brought, strict=False) if one is None]
        result += [q.codes, *(part for part in fresh if part is not None)]
    return result


def by_axis(given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Scale, outer scale, zero point and random words along rows and along columns. given: nothing, the scales along rows and
    columns, or these and both random words."""
    rows, columns = given[6:] if len(given) > 6 else (None, None)
    return (*(given[:3] or (None,) * 3), rows), (*(given[3:6] or (None,) * 3), columns)


def _quantize_both_fake(
    x: torch.Tensor, scheme: str, packed: bool, given: list[Any], one_scale: bool
) -> list[torch.Tensor]:
    record, result = record_of(scheme), []
    for shape, brought in zip((tuple(x.shape), tuple(x.shape)[::-1]), by_axis(given), strict=True):
        result.append(fresh_codes(x, shape, record, packed))
        if brought[0] is None:
            result += fresh_scales(x, record, -1, brought[1] is None, shape)
    return result


def _quantize_both(record: Any, values: Values, operands: Operands) -> tuple[Quantized, Quantized]:
    packed, tiled, one_scale = values
    (x, *rest), name = operands, record_name(record)
    scheme, shape = constant_record(name), tuple(operands[0].shape)
    if len(shape) != 2:
        raise ValueError(f"quantize_both takes a matrix (M, K), got shape {shape}; reshape it to two axes")
    for size in (shape, shape[::-1]) if tiled else ():
        check_tiled(scheme, size, -1)
    result, results = torch.ops.ao_lab.quantize_both(x, name, packed, rest, one_scale), []
    for size, brought in zip((shape, shape[::-1]), by_axis(rest), strict=True):
        count = 1 + sum(
            has and brought[0] is None and one is None
            for has, one in zip(has_parts(scheme), brought[:3], strict=True)
        )
        q = quantized_of(scheme, result[:count], size, 1, packed, brought[:3])
        result = result[count:]
        results.append(with_tiled_scales(q) if tiled else q)
    return results[0], results[1]


def _quantize_both_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By one read of x, where a kernel does that; otherwise along rows, and then along columns."""
    packed, tiled, _ = values
    x, *rest = operands
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    first, second = by_axis(rest)
    if first[3] is None and second[3] is None:
        from fast.kernels.rowwise_colwise.host import fused_both

        pair = None if not rest else (given_of(*first[:3]), given_of(*second[:3]))
        result = fused_both(x, record, pair, tiled, packed, key)
        if result is not None:
            return result
    result = []
    for side, brought in ((x, first), (x.t(), second)):
        operands = operands_of(side, given_of(*brought[:3]), brought[3])
        function, operands = as_turned(operands, -1, tiled)
        result.append(execute(function, record, (-1, packed, tiled), operands))
    return tuple(result)


def _quantize_both_reference(record: Any, values: Values, operands: Operands) -> Any:
    packed, tiled, _ = values
    x, *rest = operands
    scales, words = (
        [[given_of(*side[:3]), side[3]][at] for side in by_axis(rest)] if rest else None for at in (0, 1)
    )
    words = None if words == [None, None] else words
    return reference.quantize_both(x, record, scales=scales, random_bits=words, packed=packed, tiled=tiled)


SIDES = ("the rows", "the columns")
PAIRED = (
    *(f"{name} of {side}" for side in SIDES for name in GIVEN[1:4]),
    *(f"random_bits of {side}" for side in SIDES),
)
QUANTIZE_BOTH = Function(
    "quantize_both", ("x", *PAIRED), _quantize_both_reference, _quantize_both, _quantize_both_kernel
)
register("quantize_both", quantize_both_op, _quantize_both_fake)


def both_values(x: torch.Tensor, scheme: Scheme) -> Pair:
    """`fake_quantize` of a matrix along its rows, and along its columns; no gradient."""
    result: Pair = run(BOTH_VALUES, scheme, (), (x,))
    return result


def values_and_codes(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, Quantized]:
    """`fake_quantize` of a matrix along its rows, and `quantize` along its columns; no gradient."""
    result: tuple[torch.Tensor, Quantized] = run(VALUES_AND_CODES, scheme, (), (x,))
    return result


def both_values_op(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    """Values along rows and along columns."""
    return list(execute(BOTH_VALUES, record_of(scheme), (), (x,)))


def _both_values_fake(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]


def _both_values(record: Any, values: Values, operands: Operands) -> Pair:
    rows, columns = BOTH_VALUES_OP(operands[0], record_name(record))
    return rows, columns


def _both_values_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels import both_axes

    x = operands[0]
    result = both_axes.both_values(x, record, key)
    return (
        tuple(execute(FAKE_QUANTIZE, record, (axis,), (x,)) for axis in (1, 0)) if result is None else result
    )


BOTH_VALUES = Function(
    "both_values", ("x",), lambda r, v, o: tuple(reference.fake_quantize(o[0], r, axis=axis) for axis in (1, 0)),
    _both_values, _both_values_kernel,
)  # fmt: skip
BOTH_VALUES_OP = register("both_values", both_values_op, _both_values_fake)


def values_and_codes_op(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    """Values along rows; codes along columns, with their scales."""
    result, q = execute(VALUES_AND_CODES, record_of(scheme), (), (x,))
    # On a CPU codes of columns lie as their transpose does.
    return [result, *(part.contiguous() for part in (q.codes, q.scale, q.outer, q.zero) if part is not None)]


def _values_and_codes_fake(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    record = record_of(scheme)
    values = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [values, fresh_codes(x, tuple(x.shape), record, False), *fresh_scales(x, record, 0, True)]


def _values_and_codes(record: Any, values: Values, operands: Operands) -> tuple[torch.Tensor, Quantized]:
    x, name = operands[0], record_name(record)
    result, *stored = VALUES_AND_CODES_OP(x, name)
    return result, quantized_of(constant_record(name), stored, tuple(x.shape), 0, False)


def _values_and_codes_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels import both_axes

    x = operands[0]
    result = both_axes.values_and_codes(x, record, key)
    if result is not None:
        return result
    return execute(FAKE_QUANTIZE, record, (1,), (x,)), execute(QUANTIZE, record, CODES_DOWN, (x,))


VALUES_AND_CODES = Function(
    "values_and_codes", ("x",),
    lambda r, v, o: (reference.fake_quantize(o[0], r, axis=1), reference.quantize(o[0], r, axis=0)),
    _values_and_codes, _values_and_codes_kernel,
)  # fmt: skip
VALUES_AND_CODES_OP = register("values_and_codes", values_and_codes_op, _values_and_codes_fake)
