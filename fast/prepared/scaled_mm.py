"""Inputs quantized by a `Program`, then `torch._scaled_mm` of their codes by a kept weight's: nothing is looked up or asked
between the two."""

from __future__ import annotations

import torch

from fast.prepared.products import prepared_codes
from fast.prepared.program import Program
from reference import Quantized, Scales, Scheme


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
    made = program.quantized.launch(program.quantized, x, None)
    if made is None:
        return None
    (codes, left), (right, scale) = made if program.left is None else (made, program.left), program.operands
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
    made = prepared_codes(x, scheme, scales, dtypes[0])
    if made is None or w.outer is not None or w.zero is not None:
        return None
    quantized, fresh = made
    left = None if fresh or scales is None else scales.scale
    if left is not None and not left.is_contiguous():
        return None
    return ScaledProduct(quantized, left, w, dtypes[1], shape)


__all__ = ["ScaledProduct", "prepared_scaled_mm"]
