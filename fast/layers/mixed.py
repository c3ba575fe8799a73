"""Matrices mixed by a Hadamard transform, then quantized: as values or as codes, along either axis, in the matrix's own layout.

Along axis 0 they are those of the transposed matrix along its last axis, transposed back, without a transposition. Words of
stochastic rounding are those of `reference.random_bits` for the matrix (axis 0: the transposed one) and a seed; kernels draw
them where they round. No name of `fast` itself: operands of training products.
"""

from __future__ import annotations

import torch

from fast.device import has_kernels, is_traced
from fast.layers.hadamard import hadamard
from fast.quantize.fake_quantize import fake_quantize
from fast.quantize.quantize import quantize
from reference import Quantized, Scheme
from reference.formats.rounding import random_bits


def mixed_values(
    x: torch.Tensor,
    scheme: Scheme,
    axis: int = 1,
    *,
    hadamard_length: int = 0,
    seed: int = 0,
    stream: int = 0,
) -> torch.Tensor:
    """dequantize(quantize(hadamard(x))) in x's dtype, for a matrix (M, K), in blocks along an axis (0 or 1): (M, K)."""
    if not hadamard_length and scheme.rounding != "stochastic":
        return fake_quantize(x, scheme, axis=axis)
    if not is_traced(x) and has_kernels(x):
        from fast.kernels import hadamard as host

        rule = host.Rule(scheme, hadamard_length, axis)
        if host.covers(x, rule):
            return host.quantized_values(x, rule, seed, stream)
    mixed = _mixed(x, hadamard_length, axis)
    return fake_quantize(mixed, scheme, axis=axis, random_bits=words(mixed, scheme, axis, seed, stream))


def mixed_codes(
    x: torch.Tensor,
    scheme: Scheme,
    axis: int = 1,
    *,
    hadamard_length: int = 0,
    seed: int = 0,
    stream: int = 0,
) -> Quantized:
    """quantize(hadamard(x)) of a matrix (M, K) in blocks along an axis: codes (M, K), scales as `reference.quantize` has."""
    drawn = scheme.rounding == "stochastic"
    if (hadamard_length or drawn) and not is_traced(x) and has_kernels(x):
        from fast.kernels import hadamard as host

        rule = host.Rule(scheme, hadamard_length, axis)
        if host.covers(x, rule):
            return host.quantized(x, rule, seed, stream)
    mixed = _mixed(x, hadamard_length, axis)
    return quantize(mixed, scheme, axis=axis, random_bits=words(mixed, scheme, axis, seed, stream))


def _mixed(x: torch.Tensor, length: int, axis: int) -> torch.Tensor:
    return hadamard(x, length, axis) if length else x


def words(x: torch.Tensor, scheme: Scheme, axis: int, seed: int, stream: int) -> torch.Tensor | None:
    """Words of x's elements in x's layout, where the scheme takes any."""
    if scheme.rounding != "stochastic":
        return None
    shape = tuple(x.shape) if axis else tuple(x.shape)[::-1]
    if has_kernels(x):
        from fast.kernels.random_words import random_words

        drawn = random_words(shape, seed, stream, x.device)
    else:
        drawn = torch.from_numpy(random_bits(shape, seed=seed, stream=stream)).to(x.device)
    return drawn if axis else drawn.t().contiguous()


__all__ = ["mixed_codes", "mixed_values", "words"]
