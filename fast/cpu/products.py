"""Products of layers on a CPU, prepared for inputs like those that they had: inputs quantized and the weight decoded, or codes
multiplied, by compiled loops, and nothing looked up between.

They are called as `fast.prepared.Program` is: `launch(program, x, bias)`, None where the ordinary call has to compute. Results
have the bits of that call: of `Dequantized` torch's product of what `reference.fake_quantize` and `reference.dequantize` give,
of `Integers` those of `reference.linear` with accumulation "blocked" and one block, of `Fused` those of
`fast.cpu.linear.linear_of_rows` of what `reference.fake_quantize` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fast.cpu.prepared_dequantize import Plan as Weight
from fast.cpu.prepared_dequantize import prepared as prepared_weight
from fast.cpu.quantize import NOT_GIVEN, Plan, plan_of
from reference import Quantized, Scales, Scheme

if TYPE_CHECKING:
    from fast.cpu.linear import PreparedRows


class Dequantized:
    """x as its scheme represents it times the dequantized weight, in x's dtype."""

    __slots__ = ("arrays", "given", "inputs", "known", "launch", "parts", "shape", "weight")

    def __init__(
        self,
        inputs: Plan | None,
        given: tuple[Any, ...],
        weight: Weight,
        w: Quantized,
        shape: tuple[int, ...],
    ) -> None:
        """inputs: None for those that are taken as they are; given: parts of their scales; shape: of the result."""
        self.inputs, self.given, self.weight, self.shape = inputs, given, weight, shape
        self.parts = (w.codes, w.scale, w.zero)
        self.arrays, self.known, self.launch = weight.arrays(*self.parts), addresses(self.parts), dequantized


def dequantized(program: Dequantized, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The product; None where its bits are for the reference to say, and where the weight has moved or has a zero point, which
    is copied for the loop."""
    if not x.is_cpu or addresses(program.parts) != program.known or program.parts[2] is not None:
        return None
    rows = x if program.inputs is None else program.inputs.values(x, *program.given)
    dense = None if rows is None else program.weight.decoded(*program.arrays)
    if rows is None or dense is None:
        return None
    rows = rows.view(-1, rows.shape[-1])
    y = torch.mm(rows, dense.t()) if bias is None else torch.addmm(bias.to(x.dtype), rows, dense.t())
    return in_shape(y, program.shape)


class Integers:
    """Codes of x times those of a weight, int8 both: exact sums, scaled afterwards."""

    __slots__ = (
        "codes",
        "dtype",
        "given",
        "inputs",
        "known",
        "launch",
        "parts",
        "scale",
        "scaled",
        "shape",
        "sums",
    )

    def __init__(
        self, inputs: Plan, given: tuple[Any, ...], w: Quantized, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        """As of `Dequantized`; dtype: of the inputs."""
        from fast.cpu.linear import integer_sums
        from fast.cpu.loops.ends import compiled_sums

        self.inputs, self.given, self.dtype, self.shape = inputs, given, dtype, shape
        self.parts, self.known = (w.codes, w.scale), addresses((w.codes, w.scale))
        self.codes, self.scale = w.codes.view(torch.int8).t(), w.scale.reshape(-1).numpy()
        self.scaled, self.sums, self.launch = compiled_sums(inputs.rule.has_zero), integer_sums, integers


def integers(program: Integers, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The product; None where the bits of the codes are for the reference to say, and where the weight has moved."""
    if not x.is_cpu or addresses(program.parts) != program.known:
        return None
    made = program.inputs.codes(x, *program.given)
    if made is None:
        return None
    codes, scale, zero = made
    sums = program.sums(codes.view(-1, codes.shape[-1]), program.codes)
    whole = NO_SUMS
    if program.inputs.rule.has_zero:
        ones = codes.new_ones((1, codes.shape[-1]))
        whole = program.sums(ones, program.codes).view(-1).numpy()
    added = NO_BIAS if bias is None else bias.detach().to(torch.float32).contiguous().numpy()
    y = torch.empty(sums.shape, dtype=torch.float32, device="cpu")
    program.scaled(sums.numpy(), scale.reshape(-1), zero.reshape(-1), whole, program.scale, added, y.numpy())
    return in_shape(y.to(program.dtype), program.shape)


class Fused:
    """x as its scheme represents it, or as it is, times a weight that is decoded on the way, in x's dtype."""

    __slots__ = ("given", "inputs", "known", "launch", "multiply", "parts", "shape")

    def __init__(
        self, inputs: Plan | None, given: tuple[Any, ...], multiply: PreparedRows, w: Quantized, shape: tuple[int, ...]
    ) -> None:  # fmt: skip
        """As of `Dequantized`; multiply: what `fast.cpu.linear.linear_of_rows` does with as many rows."""
        self.inputs, self.given, self.multiply, self.shape = inputs, given, multiply, shape
        self.parts = (w.codes, w.scale, w.outer, w.zero)
        self.known, self.launch = addresses(self.parts), fused


def fused(program: Fused, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The product; None where its bits are for others to say, and where the weight has moved."""
    if not x.is_cpu or addresses(program.parts) != program.known:
        return None
    rows = x if program.inputs is None else program.inputs.values(x, *program.given)
    y = None if rows is None else program.multiply(rows.detach().reshape(-1, rows.shape[-1]), bias)
    return None if y is None else in_shape(y, program.shape)


#: Rows whose sums are scaled on one thread, at most.
MOST_ROWS = 64
NO_SUMS, NO_BIAS = np.zeros(1, np.int32), np.zeros(0, np.float32)


def in_shape(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """y in a shape; itself where it has that, since who adds to it in place, with a gradient, may not have a view."""
    return y if y.shape == shape else y.view(shape)


def addresses(parts: tuple[torch.Tensor | None, ...]) -> tuple[int, ...]:
    """Where tensors lie."""
    return tuple([0 if part is None else part.data_ptr() for part in parts])


def prepared_dequantized(
    x: torch.Tensor, w: Quantized, shape: tuple[int, ...], scheme: Scheme | None, scales: Scales | None
) -> Dequantized | None:
    """The product of x (M, K) in a scheme, its scales found or given, by a weight (N, K), its result in a shape of as many
    elements; None where a loop is not for both, and for parts that have gaps."""
    given = NOT_GIVEN if scales is None else (scales.scale, scales.outer, scales.zero)
    inputs = None if scheme is None else plan_of(x, scheme, -1, given=given)
    lies = w.codes.is_contiguous() and w.scale.is_contiguous() and not w.codes.is_neg()
    if (scheme is not None and inputs is None) or w.zero is not None or w.outer is not None or not lies:
        return None
    weight = prepared_weight(w, str(x.dtype).removeprefix("torch."))
    if not isinstance(weight, Weight):
        return None
    return Dequantized(inputs, () if scales is None else given, weight, w, shape)


def prepared_fused(
    x: torch.Tensor, w: Quantized, shape: tuple[int, ...], scheme: Scheme | None, scales: Scales | None
) -> Fused | None:
    """As `prepared_dequantized`, by a weight that is decoded on the way."""
    from fast.cpu.linear import prepared_rows

    given = NOT_GIVEN if scales is None else (scales.scale, scales.outer, scales.zero)
    inputs = None if scheme is None else plan_of(x, scheme, -1, given=given)
    multiply = prepared_rows(x, w) if scheme is None or inputs is not None else None
    if multiply is None:
        return None
    return Fused(inputs, () if scales is None else given, multiply, w, shape)


def prepared_integers(
    x: torch.Tensor, w: Quantized, shape: tuple[int, ...], scheme: Scheme, scales: Scales | None
) -> Integers | None:
    """The product of x (M, K) in a scheme of int8, one scale a row, found or given, by an int8 weight (N, K) without zero
    points, its result in a shape of as many elements; None where the loop is not for such inputs, and for parts that have
    gaps."""
    if len(x) > MOST_ROWS:
        return None
    given = NOT_GIVEN if scales is None else (scales.scale, scales.outer, scales.zero)
    inputs = plan_of(x, scheme, -1, codes=True, given=given)
    lies = w.codes.is_contiguous() and w.scale.is_contiguous()
    if inputs is None or inputs.blocks[1] != 1 or not lies:
        return None
    parts = () if scales is None else (scales.scale, scales.zero)
    return Integers(inputs, parts, w, x.dtype, shape)


__all__ = ["Dequantized", "Fused", "Integers", "prepared_dequantized", "prepared_fused", "prepared_integers"]
