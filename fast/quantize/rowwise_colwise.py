"""`quantize_both` for torch tensors; see `reference.quantize.quantize`.

A matrix's blocks along rows and along columns at once, in its own layout: values of both, or values and codes.

From one read where a kernel does that (`fast.kernels.values`), otherwise from two: the same bits. No name of `fast` itself:
operands of training products.
"""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.ops import constant_record, record_name, register
from fast.quantize.fake_quantize import FAKE_QUANTIZE
from fast.quantize.quantize import (
    QUANTIZE,
    QUANTIZE_BOTH,
    Operands,
    Values,
    fresh_codes,
    fresh_scales,
    operands_of,
    quantized_of,
)
from reference import Quantized, Scheme
from reference.schemes.schemes import record_of

Pair = tuple[torch.Tensor, torch.Tensor]
#: Plain values of `quantize` along columns: neither packed nor tiled.
CODES_DOWN = (0, False, False)


def both_values(x: torch.Tensor, scheme: Scheme) -> Pair:
    """`fake_quantize` of a matrix along its rows, and along its columns; no gradient."""
    made: Pair = run(BOTH_VALUES, scheme, (), (x,))
    return made


def values_and_codes(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, Quantized]:
    """`fake_quantize` of a matrix along its rows, and `quantize` along its columns; no gradient."""
    made: tuple[torch.Tensor, Quantized] = run(VALUES_AND_CODES, scheme, (), (x,))
    return made


# both_values


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
    made = both_axes.both_values(x, record, key)
    return tuple(execute(FAKE_QUANTIZE, record, (axis,), (x,)) for axis in (1, 0)) if made is None else made


BOTH_VALUES = Function(
    "both_values", ("x",), lambda r, v, o: tuple(reference.fake_quantize(o[0], r, axis=axis) for axis in (1, 0)),
    _both_values, _both_values_kernel,
)  # fmt: skip
BOTH_VALUES_OP = register("both_values", both_values_op, _both_values_fake)

# values_and_codes


def values_and_codes_op(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    """Values along rows; codes along columns, with their scales."""
    made, q = execute(VALUES_AND_CODES, record_of(scheme), (), (x,))
    # On a CPU codes of columns lie as their transpose does.
    return [made, *(part.contiguous() for part in (q.codes, q.scale, q.outer, q.zero) if part is not None)]


def _values_and_codes_fake(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    record = record_of(scheme)
    values = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [values, fresh_codes(x, tuple(x.shape), record, False), *fresh_scales(x, record, 0, True)]


def _values_and_codes(record: Any, values: Values, operands: Operands) -> tuple[torch.Tensor, Quantized]:
    x, name = operands[0], record_name(record)
    made, *stored = VALUES_AND_CODES_OP(x, name)
    return made, quantized_of(constant_record(name), stored, tuple(x.shape), 0, False)


def _values_and_codes_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels import both_axes

    x = operands[0]
    made = both_axes.values_and_codes(x, record, key)
    if made is not None:
        return made
    return execute(FAKE_QUANTIZE, record, (1,), (x,)), execute(QUANTIZE, record, CODES_DOWN, (x,))


VALUES_AND_CODES = Function(
    "values_and_codes", ("x",),
    lambda r, v, o: (reference.fake_quantize(o[0], r, axis=1), reference.quantize(o[0], r, axis=0)),
    _values_and_codes, _values_and_codes_kernel,
)  # fmt: skip
VALUES_AND_CODES_OP = register("values_and_codes", values_and_codes_op, _values_and_codes_fake)


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
    made: tuple[Quantized, Quantized] = run(QUANTIZE_BOTH, scheme, (packed, tiled, one_scale), (x, *given))
    return made


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
