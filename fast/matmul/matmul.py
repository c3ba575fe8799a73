"""`matmul` with a stated accumulation and its error bound, for torch tensors; see `reference.matmul`.

This is the specification on torch tensors, computed on the host: for tests and measurements, not for speed. Asking for a
gradient is an error.

`matmul` with a stated accumulation and its error bound below their signatures; see `fast.dispatch`.

Operands are tensors or the parts of a `Quantized`; what else is said travels as text (JSON).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, require_tensor, run
from fast.ops import constant_result, no_gradient, record_name, register
from reference import Quantized
from reference.arrays.namespace import DTypeLike, spelled
from reference.schemes.schemes import record_of

#: Tensors of an operand: a tensor alone, or codes, scale, outer scale and zero point.
PARTS = 4
#: Addresses at which torch's kernels read several elements at once are multiples of this.
ALIGNMENT = 16
FIELDS = ("shape", "axis", "packed", "tiled")


def taken_apart(value: Any) -> tuple[tuple[Any, ...], Any]:
    """The tensors of an operand, and all else that it says; None of a tensor."""
    if not isinstance(value, Quantized):
        return (value, None, None, None), None
    fields = {name: getattr(value, name) for name in FIELDS}
    return (value.codes, value.scale, value.outer, value.zero), {
        **fields,
        "scheme": record_name(value.scheme),
    }


def put_together(tensors: Sequence[Any], fields: Any) -> Any:
    """The inverse of `taken_apart`."""
    if fields is None:
        return tensors[0]
    shape, axis, packed, tiled = (fields[name] for name in FIELDS)
    return Quantized(*tensors, tuple(shape), axis, record_of(fields["scheme"]), packed, tiled)


def described(a: Any, b: Any, **options: Any) -> tuple[str, tuple[Any, ...]]:
    """A call as text and tensors. TypeError for options that are no plain values."""
    (first, left), (second, right) = taken_apart(a), taken_apart(b)
    return _text(left, right, options), (*first, *second)


@constant_result
def _text(left: Any, right: Any, options: dict[str, Any]) -> str:
    return json.dumps([left, right, options])


def _reference(specified: Callable[..., Any]) -> Callable[..., Any]:
    def run(record: Any, values: Any, operands: Sequence[Any]) -> Any:
        left, right, options = json.loads(values[0])
        operands = [aligned(operand) for operand in operands]
        a, b = put_together(operands[:PARTS], left), put_together(operands[PARTS : 2 * PARTS], right)
        return specified(a, b, bias=operands[-1], **options)

    return run


def aligned(operand: Any) -> Any:
    """A tensor where torch's sums on GPUs run in one order: at an odd address they read, and add, element by element."""
    odd = isinstance(operand, torch.Tensor) and operand.is_cuda and operand.data_ptr() % ALIGNMENT
    return operand.clone() if odd else operand


def _fake(*arguments: Any) -> torch.Tensor:
    """Shapes as `torch.matmul` has them; an error bound is float64."""
    *tensors, _bias, text = arguments
    left, right, options = json.loads(text)
    a, b = (
        side[0].shape if fields is None else fields["shape"]
        for side, fields in ((tensors[:PARTS], left), (tensors[PARTS:], right))
    )
    shape = torch.matmul(torch.empty(a, device="meta"), torch.empty(b, device="meta")).shape
    result: torch.Tensor = tensors[0].new_empty(shape, dtype=getattr(torch, options["out_dtype"]))
    return result


def _fake_bound(*arguments: Any) -> torch.Tensor:
    return _fake(*arguments).to(torch.float64)


OPERANDS = (
    *(f"{part} of {side}" for side in "ab" for part in ("elements", "scale", "outer scale", "zero point")),
    "bias",
)
SCHEMA = (
    "(Tensor a, Tensor? a_scale, Tensor? a_outer, Tensor? a_zero, "
    "Tensor b, Tensor? b_scale, Tensor? b_outer, Tensor? b_zero, Tensor? bias, str text) -> Tensor"
)
ADVICE = (
    "it is the specification, for tests and measurements; detach its operands, or use linear or torch.matmul"
)


def _function(name: str, specified: Callable[..., Any], fake: Callable[..., torch.Tensor]) -> Function:
    """A function of `reference` and its operator, which takes the tensors of a, those of b, bias and the text."""

    def implementation(*arguments: Any) -> torch.Tensor:
        *operands, text = arguments
        result: torch.Tensor = execute(function, None, (text,), operands)
        return result

    operator = register(name, implementation, fake, no_gradient(name, ADVICE), schema=SCHEMA)
    function = Function(
        name, OPERANDS, _reference(specified), lambda r, v, o: operator(*o, *v), differentiable=True
    )
    return function


MATMUL = _function("matmul", reference.matmul, _fake)
BOUND = _function("matmul_error_bound", reference.matmul_error_bound, _fake_bound)


Operand = torch.Tensor | Quantized


def matmul(
    a: Operand,
    b: Operand,
    *,
    accumulation: str = "exact",
    out_dtype: DTypeLike = "float32",
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """a (..., M, K) times b (..., K, N) plus bias, on a's device. Arguments, options and errors as in `reference.matmul`."""
    return _run(MATMUL, a, b, bias, {"accumulation": accumulation, "out_dtype": _name(out_dtype), **options})


def matmul_error_bound(
    a: Operand,
    b: Operand,
    *,
    accumulation: str = "exact",
    out_dtype: DTypeLike = "float32",
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The largest error of each element, as in `reference.matmul_error_bound`."""
    return _run(BOUND, a, b, bias, {"accumulation": accumulation, "out_dtype": _name(out_dtype), **options})


def _run(
    function: Function, a: Operand, b: Operand, bias: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    for operand in (a, b):
        require_tensor(operand.codes if isinstance(operand, Quantized) else operand, function.name)
    text, tensors = described(a, b, **options)
    result: torch.Tensor = run(function, None, (text,), (*tensors, bias))
    return result


def _name(dtype: DTypeLike) -> str:
    """The dtype's name; what is none goes on as text, for the reference to name."""
    return spelled(dtype) or str(dtype)
