"""Products prepared for inputs like those that they had, for those who keep their weights: `fast.linear`, `linear_small`, also
of inputs in a scheme, `fast.quantize` and `fast.linear_of_codes` of inputs that are quantized first, as a `Program`.

`ScaledProduct`: inputs quantized by a `Program`, then `torch._scaled_mm` of their codes by a kept weight's; nothing is looked
up or asked between the two.
"""

from __future__ import annotations

from typing import Any

import torch

from fast import dispatch
from fast.launch.program import ABSENT, BIAS, Program, Steps, X
from fast.matmul.codes_ops import LINEAR_OF_CODES
from fast.matmul.linear import LINEAR
from fast.matmul.preshuffled.dynamic import CODES, LINEAR_SMALL_DYNAMIC, inputs_record, kind_of
from fast.matmul.preshuffled.linear import LINEAR_SMALL, MOST_ROWS, values_of
from fast.quantize.fake_quantize import FAKE_QUANTIZE
from fast.quantize.quantize import QUANTIZE, operands_of, quantize
from fast.quantize.static_scales import QUANTIZE_ROWS, quantize_rows
from reference import Quantized, Scales, Scheme


def prepared_linear(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None, shape: tuple[int, ...]
) -> Program | None:
    """`fast.linear(x, w, bias)` of a matrix x, its result in a shape of as many elements; None where the cache has no call like
    it, which it has after the first."""
    operands = (x, w.codes, w.scale, w.outer, w.zero, bias)
    call = dispatch.find(dispatch.key_of(LINEAR.name, w.scheme, dispatch.settings(w), operands))
    steps = Steps(*operands[1:5])
    result = steps.add(call, (X, *map(steps.place, operands[1:5]), ABSENT if bias is None else BIAS))
    return _program(steps, result, shape, x.device)


def prepared_linear_small(
    x: torch.Tensor,
    w: Quantized,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    scheme: Scheme | None = None,
    first: str = "",
) -> Program | None:
    """The same of a preshuffled weight (`fast.matmul.preshuffled.linear`, which has `first`), and of inputs in a scheme: by
    `dynamic`, or `fast.fake_quantize` of them and the product of that."""
    operands, values = (x, w.codes, w.scale, w.zero, bias), values_of(w.shape, first)
    steps = Steps(*operands[1:4])
    inputs: Any = X
    call = None if scheme is None else _dynamic_call(operands, w, scheme)
    if call is None:
        inputs = X if scheme is None else steps.add(_rounding_call(x, scheme), (X,))
        call = dispatch.find(dispatch.key_of(LINEAR_SMALL.name, w.scheme, values, operands))
    if not isinstance(inputs, int):
        return None
    result = steps.add(call, (inputs, *map(steps.place, operands[1:4]), ABSENT if bias is None else BIAS))
    return _program(steps, result, shape, x.device)


def _dynamic_call(operands: tuple[Any, ...], w: Quantized, scheme: Scheme) -> Any:
    """Of the cache: what quantizes few rows and multiplies them."""
    values = (tuple(w.shape), scheme.key)
    return dispatch.find(dispatch.key_of(LINEAR_SMALL_DYNAMIC.name, w.scheme, values, operands))


def _rounding_call(x: torch.Tensor, scheme: Scheme) -> Any:
    """Of the cache: `fast.fake_quantize` of x, as `linear_small_dynamic` calls it or its caller does. None for few rows whose
    codes are multiplied as they are."""
    kind = kind_of(scheme)
    if kind == CODES and x.shape[0] <= MOST_ROWS:
        return None
    record = scheme if kind is None else inputs_record(scheme.key)
    return dispatch.find(dispatch.key_of(FAKE_QUANTIZE.name, record, (-1,), operands_of(x, None, None)))


def prepared_linear_of_codes(
    x: torch.Tensor,
    w: Quantized,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    scheme: Scheme,
    scales: Scales | None = None,
    by_rows: bool = False,
) -> Program | None:
    """`fast.linear_of_codes` of x in a scheme, by `fast.quantize(x, scheme, scales=scales)`, or for by_rows by `quantize_rows`:
    both in one program."""
    if by_rows and scales is not None:
        given: tuple[Any, ...] = (x, scales.scale, scales.zero)
        key = dispatch.key_of(QUANTIZE_ROWS.name, scheme, (), given)
        q = quantize_rows(x, scheme, scales)
    else:
        given = operands_of(x, scales, None)
        key = dispatch.key_of(QUANTIZE.name, scheme, (-1, False, False), given)
        q = quantize(x, scheme, scales=scales)
    parts = (w.codes, w.scale)
    steps = Steps(*given[1:], *parts)
    codes = steps.add(dispatch.find(key), (X, *map(steps.place, given[1:])))
    if not isinstance(codes, Quantized) or q.outer is not None or w.outer is not None or w.zero is not None:
        return None
    values = (x.dtype, w.scheme.key, False, False, *dispatch.settings(q), *dispatch.settings(w))
    call = dispatch.find(
        dispatch.key_of(LINEAR_OF_CODES.name, q.scheme, values, (q.codes, q.scale, q.zero, *parts, bias))
    )
    output = (ABSENT if part is None else part for part in (codes.codes, codes.scale, codes.zero))
    result = steps.add(call, (*output, *map(steps.place, parts), ABSENT if bias is None else BIAS))
    return _program(steps, result, shape, x.device)


def prepared_codes(
    x: torch.Tensor, scheme: Scheme, scales: Scales | None, dtype: torch.dtype
) -> tuple[Program, bool] | None:
    """`fast.quantize(x, scheme, scales=scales)` of a matrix x: its codes in a dtype of a byte and, where they were not given
    (True), its scales. None as above, and for more than codes and a scale."""
    given = operands_of(x, scales, None)
    steps = Steps(*given[1:])
    call = dispatch.find(dispatch.key_of(QUANTIZE.name, scheme, (-1, False, False), given))
    result = steps.add(call, (X, *map(steps.place, given[1:])))
    if not isinstance(result, Quantized) or result.outer is not None or result.zero is not None:
        return None
    codes: Any = result.codes
    scale: Any = result.scale
    steps.view(codes, tuple(x.shape), dtype)
    fresh = scale >= steps.first
    return Program(steps, (codes, scale) if fresh else (codes,), x.device), fresh


def _program(steps: Steps, result: Any, shape: tuple[int, ...], device: torch.device) -> Program | None:
    """Of the place of the result, which gets this shape; None where there is none."""
    if not isinstance(result, int):
        return None
    steps.view(result, shape)
    return Program(steps, (result,), device)


class ScaledProduct:
    """Codes of x (..., K) times those of a weight (N, K), for inputs of one shape and dtype; called as a `Program` is.

    The weight's codes and scales as torch takes them are views of its tensors, made anew where these have moved.
    """

    __slots__ = ("codes", "dtype", "known", "launch", "left", "operands", "quantized", "scale", "shape")

    def __init__(
        self, quantized: Program, left: torch.Tensor | None, w: Quantized, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:  # fmt: skip
        """quantized: gives codes, and scales where `left`, those that were given, is None. dtype: of the weight's codes. shape:
        of the result."""
        self.quantized, self.left, self.dtype, self.shape = quantized, left, dtype, shape
        self.codes, self.scale, self.launch = w.codes, w.scale, launch
        self.known, self.operands = (0, 0), (w.codes, w.scale)

    def are_readable(self, addresses: tuple[int, int]) -> bool:
        """Whether tensors at these addresses are taken as they are: `operands` are codes (K, N), scales (1, N) or one then."""
        readable = self.codes.is_contiguous() and self.scale.is_contiguous()
        if readable:
            scale = self.scale if self.scale.dim() == 0 else self.scale.t()
            self.operands, self.known = (self.codes.view(self.dtype).t(), scale), addresses
        return readable


def launch(program: ScaledProduct, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The product; None where the inputs' program gives None, and where the weight has strides. What torch refuses, it refuses
    in the ordinary call too."""
    addresses = program.codes.data_ptr(), program.scale.data_ptr()
    if addresses != program.known and not program.are_readable(addresses):
        return None
    result = program.quantized.launch(program.quantized, x, None)
    if result is None:
        return None
    (codes, left), (right, scale) = (
        result if program.left is None else (result, program.left),
        program.operands,
    )
    y: torch.Tensor = torch._scaled_mm(codes, right, left, scale, bias, None, x.dtype)
    return y.view(program.shape)


def prepared_scaled_mm(
    x: torch.Tensor,
    w: Quantized,
    shape: tuple[int, ...],
    scheme: Scheme,
    scales: Scales | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> ScaledProduct | None:
    """torch's product of `fast.quantize(x, scheme, scales=scales)` of a matrix x by a weight (N, K), its result in a shape.

    dtypes: of both codes. Both have one scale, or one for each row. None where the cache has no call that quantizes like it.
    """
    result = prepared_codes(x, scheme, scales, dtypes[0])
    if result is None or w.outer is not None or w.zero is not None:
        return None
    quantized, fresh = result
    left = None if fresh or scales is None else scales.scale
    if left is not None and not left.is_contiguous():
        return None
    return ScaledProduct(quantized, left, w, dtypes[1], shape)


__all__ = [
    "ScaledProduct",
    "prepared_codes",
    "prepared_linear",
    "prepared_linear_of_codes",
    "prepared_linear_small",
    "prepared_scaled_mm",
]
