"""Products of the same inputs by two or three preshuffled weights of one scheme and length, as an operator of compiled graphs.

Queries, keys and values of a layer, whose weights have different numbers of rows. The pass of `ao_lab.compile.fused_linears`
puts the operator in place of products of one weight each; nothing else calls it, and it has no gradient.

Operands are x and the parts of each weight, values their rows and the length K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fast.dispatch import Function, execute
from fast.gemm.choose import in_one_launch
from fast.gemm.families import of_preshuffled
from fast.matmul.preshuffled.linear import LINEAR_SMALL, STORED, weight_of
from fast.matmul.preshuffled.pair import LINEAR_SMALL_PAIR
from fast.matmul.weights import Operands, Values
from fast.ops import no_gradient, record_name, register
from fast.scale_factors import ArrangedWeight, form_of
from reference.matmul.linear import check_linear
from reference.schemes.schemes import record_of

#: The most weights at once.
MOST_WEIGHTS = 3
OPERANDS = ("x", *(f"{part} of weight {at}" for at in range(1, MOST_WEIGHTS + 1) for part in STORED))
SCHEMA = "(Tensor x, Tensor?[] stored, SymInt[] rows, SymInt length, str scheme) -> Tensor[]"


def linear_small_several_op(
    x: torch.Tensor, stored: Sequence[torch.Tensor | None], rows: Sequence[int], length: int, scheme: str
) -> list[torch.Tensor]:
    """x (..., K) times the transposes of preshuffled weights (N_i, K) of one scheme: (..., N_i) in x's dtype.

    stored: codes, scale and zero point of each weight in turn. rows: N_i, of two or three weights. On Hopper up to 16 rows of
    bfloat16 or float16 take one launch where `sm90_w4a16_gemv` multiplies by each of them through shared memory; else weights
    of one shape are multiplied two and two (`linear_small_pair`), and others by themselves. Results lie within
    `reference.linear_error_bound`. ValueError for other numbers of weights or parts, TypeError and ValueError as `linear`.
    """
    if not 2 <= len(rows) <= MOST_WEIGHTS or len(stored) != len(STORED) * len(rows):
        raise ValueError(
            f"linear_small_several takes 2 to {MOST_WEIGHTS} weights of {len(STORED)} parts each, got {len(rows)} numbers of "
            f"rows and {len(stored)} parts; call linear_small for each weight"
        )
    values = tuple(rows), length
    return list(execute(LINEAR_SMALL_SEVERAL, record_of(scheme), values, (x, *stored)))


def _parts(values: Values, operands: Operands) -> list[tuple[tuple[int, int], tuple[Any, ...]]]:
    """Shape and parts of each weight."""
    rows, length = values
    each = len(STORED)
    stored = [tuple(operands[at : at + each]) for at in range(1, len(operands), each)]
    return [((n, length), parts) for n, parts in zip(rows, stored, strict=True)]


def _checked(record: Any, values: Values, operands: Operands) -> Any:
    """Inputs; errors are those of `linear`."""
    for shape, stored in _parts(values, operands):
        check_linear(operands[0], weight_of(record, shape, stored), None)
    return operands[0]


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch for few 16-bit rows, or None."""
    x = _checked(record, values, operands)
    weights = [
        ArrangedWeight(*stored, shape, *form_of(record, shape[1]))
        for shape, stored in _parts(values, operands)
    ]
    largest = max(weights, key=lambda w: w.shape[0])
    if not x.numel() or not in_one_launch(of_preshuffled(largest, x.numel() // x.shape[-1], x.dtype)):
        return None
    from fast.kernels.sm90_w4a16_gemv.several import linear_small_several

    return linear_small_several(x, *weights, key=key, record=record)


def _reference(record: Any, values: Values, operands: Operands) -> Any:
    """Weights of one shape two and two, others by themselves."""
    x, made = _checked(record, values, operands), dict[int, Any]()
    waiting: dict[tuple[int, int], tuple[int, tuple[Any, ...]]] = {}
    for at, (shape, stored) in enumerate(_parts(values, operands)):
        if shape not in waiting:
            waiting[shape] = at, stored
            continue
        first, other = waiting.pop(shape)
        made[first], made[at] = execute(LINEAR_SMALL_PAIR, record, (shape,), (x, *other, *stored))
    for shape, (at, stored) in waiting.items():
        made[at] = execute(LINEAR_SMALL, record, (shape,), (x, *stored, None))
    return tuple(made[at] for at in sorted(made))


def _fake(
    x: torch.Tensor, stored: Sequence[torch.Tensor | None], rows: Sequence[int], length: int, scheme: str
) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], n)) for n in rows]


def _operate(record: Any, values: Values, operands: Operands) -> list[torch.Tensor]:
    x, *stored = operands
    made: list[torch.Tensor] = LINEAR_SMALL_SEVERAL_OP(
        x, stored, list(values[0]), values[1], record_name(record)
    )
    return made


LINEAR_SMALL_SEVERAL = Function("linear_small_several", OPERANDS, _reference, _operate, _kernel)
LINEAR_SMALL_SEVERAL_OP = register(
    "linear_small_several", linear_small_several_op, _fake,
    no_gradient("linear_small_several", "call linear_small for each weight"), schema=SCHEMA,
)  # fmt: skip

__all__ = ["LINEAR_SMALL_SEVERAL_OP", "MOST_WEIGHTS", "linear_small_several_op"]
