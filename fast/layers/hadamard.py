"""The randomized Hadamard transform of `reference.layers.hadamard` for torch tensors, the same bits; no gradient of its own.

On a GPU one read and one write (`fast.kernels.hadamard`); operations of torch where a tracer has to see them. No names of
`fast` itself: operands of training products.

`mixed_values` and `mixed_codes`: matrices mixed by it, then quantized, along either axis, in the matrix's own layout. Along
axis 0 they are those of the transposed matrix along its last axis, transposed back, without a transposition. Words of
stochastic rounding are those of `reference.random_bits` for the matrix (axis 0: the transposed one) and a seed; kernels draw
them where they round.
"""

from __future__ import annotations

from math import sqrt

import torch

from fast.dispatch import has_kernels, is_traced
from fast.quantize.fake_quantize import fake_quantize
from fast.quantize.quantize import quantize
from reference import Quantized, Scheme
from reference.formats.encode import random_bits
from reference.layers.hadamard import signs

#: Signs in a number.
PIECE = 32


def hadamard(x: torch.Tensor, length: int, axis: int = -1) -> torch.Tensor:
    """Blocks of `length` elements along an axis (the last, or 0 of a matrix) transformed; sums and differences in float32, in
    order. ValueError for a length that does not divide the axis, or is no power of two."""
    if length < 1 or length & (length - 1) or not x.dim() or x.shape[axis] % length:
        raise ValueError(
            f"hadamard mixes blocks of a power of two that divides the axis, got {length} for shape {tuple(x.shape)}; pad it"
        )
    columns = axis == 0 and x.dim() > 1
    if not is_traced(x) and has_kernels(x) and x.is_contiguous():
        from fast.kernels import hadamard as host

        matrix = x if columns else x.reshape(-1, x.shape[-1])
        rule = host.Rule(None, length, 0 if columns else 1)
        if host.covers(matrix, rule):
            return host.mixed(matrix, rule).reshape(x.shape)
    if columns:
        return _by_operations(x.t().contiguous(), length).t().contiguous()
    return _by_operations(x, length)


def rotated_back(y: torch.Tensor, length: int) -> torch.Tensor:
    """x of y = hadamard(x, length) along the last axis, in y's dtype, but for rounding."""
    sign = _signs(length, y.device).repeat(y.shape[-1] // length)
    return hadamard(y * sign, length) * sign


def _by_operations(x: torch.Tensor, length: int) -> torch.Tensor:
    """The same along the last axis by operations of torch, on any device."""
    sign = _signs(length, x.device)
    y = x.to(torch.float32).reshape(-1, length) * sign
    for stage in range(length.bit_length() - 1):
        pairs = y.reshape(-1, length >> (stage + 1), 2, 1 << stage)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack([left + right, left - right], dim=2).reshape(-1, length)
    factor = torch.full((), 1 / sqrt(length), dtype=torch.float32, device=x.device)
    return (y * factor).reshape(x.shape).to(x.dtype)


def _signs(length: int, device: torch.device) -> torch.Tensor:
    """The signs of a block, from the bits of numbers: a copy of a table from the host would wait for the GPU."""
    table = signs(length)
    return torch.cat([_piece(table[first : first + PIECE], device) for first in range(0, length, PIECE)])


def _piece(table: tuple[int, ...], device: torch.device) -> torch.Tensor:
    negative = sum(1 << at for at, sign in enumerate(table) if sign < 0)
    at = torch.arange(len(table), device=device)
    bits = torch.bitwise_right_shift(torch.full_like(at, negative), at) & 1
    return (1 - 2 * bits).to(torch.float32)


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
        from fast.kernels.encode import random_words

        drawn = random_words(shape, seed, stream, x.device)
    else:
        drawn = torch.from_numpy(random_bits(shape, seed=seed, stream=stream)).to(x.device)
    return drawn if axis else drawn.t().contiguous()
