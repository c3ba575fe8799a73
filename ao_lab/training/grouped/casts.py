"""Operands of grouped products, quantized by `fast`; `reference.training.grouped.grouped_operands` says the bits.

A scale of one group reaches over blocks that a kernel sees apart. Scales rise with the maximum that they are made of, so the
scale of many blocks is the largest of theirs: blocks get their scales, those of a group are replaced by their largest, and
codes are made with given scales. Nothing of it depends on how many rows a group has, so the host need not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import fast
from ao_lab.training.casts import Matrix, of_record, quantize_one, words
from ao_lab.training.grouped.layout import Layout
from fast.layers.hadamard import hadamard
from fast.quantize.derived import derived
from fast.quantize.two_levels import scales_of_two_levels, without_outer
from reference import Quantized, Scheme
from reference.schemes.record_text import record_of
from reference.training.recipe import Operand


@dataclass(frozen=True)
class Columns:
    """A matrix (C, P) for sums over tokens."""

    matrix: Matrix
    #: (E, C) float32: the scale of each row in each group, where there is one; it stands in the matrix's blocks too.
    table: torch.Tensor | None = None


def rows_operand(
    x: torch.Tensor, operand: Operand, layout: Layout, seed: int | None = None, stream: int = 0
) -> Matrix:
    """x (T, C) along C: one scale for each group where the scheme has one for the tensor."""
    scheme = operand.scheme
    if scheme is None or not _reaches_over_rows(scheme):
        return quantize_one(x, operand, seed, stream)
    _refuse_square(scheme)
    x = hadamard(x, operand.hadamard) if operand.hadamard else x
    owners = layout.of_rows()
    fine, scales = _fine(x, scheme, -1, lambda found: _largest(found, owners, layout.experts, whole=True)[0])
    return of_record(fast.quantize(x, fine, scales=scales, random_bits=words(x, operand, seed, stream)), fine)


def columns_operand(
    x: torch.Tensor, operand: Operand, layout: Layout, seed: int | None = None, stream: int = 0
) -> Columns:
    """x (T, C) as (C, P) along P: no block and no scale reaches over a group's end."""
    columns, scheme = layout.columns(x), operand.scheme
    columns = hadamard(columns, operand.hadamard) if operand.hadamard else columns
    if scheme is None:
        return Columns(columns)
    _refuse_square(scheme)
    drawn = words(columns, operand, seed, stream)
    if scheme.outer is None and scheme.scale.block not in ("tensor", -1):
        return Columns(of_record(fast.quantize(columns, scheme, random_bits=drawn), scheme))
    owners, whole, tables = layout.of_chunks(), scheme.scale.block == "tensor" or scheme.outer is not None, []

    def shared(found: torch.Tensor) -> torch.Tensor:
        per_chunk = owners.repeat_interleave(found.shape[1] // max(owners.shape[0], 1))
        spread, table = _largest(found.t(), per_chunk, layout.experts, whole=whole)
        tables.append(table)
        return spread.t().contiguous()

    fine, scales = _fine(columns, scheme, layout.step, shared)
    made = of_record(fast.quantize(columns, fine, scales=scales, random_bits=drawn), fine)
    return Columns(made, tables[0] if scheme.outer is None else None)


def weight_operand(w: torch.Tensor, operand: Operand, seed: int | None = None, stream: int = 0) -> Matrix:
    """w (E, R, C) along C as (E * R, C): every expert as a matrix of its own."""
    experts, rows, length = w.shape
    flat, scheme = w.reshape(experts * rows, length), operand.scheme
    if scheme is None or (scheme.outer is None and scheme.scale.block != "tensor"):
        return quantize_one(flat, operand, seed, stream)
    flat = hadamard(flat, operand.hadamard) if operand.hadamard else flat

    def shared(found: torch.Tensor) -> torch.Tensor:
        largest = found.reshape(experts, -1).amax(1, keepdim=True)
        return largest.expand(experts, found.numel() // experts).reshape(found.shape).contiguous()

    fine, scales = _fine(flat, scheme, -1, shared)
    made = fast.quantize(flat, fine, scales=scales, random_bits=words(flat, operand, seed, stream))
    return of_record(made, fine)


def weight_columns(
    w: torch.Tensor, operand: Operand, forward: Operand, seed: int | None = None, stream: int = 0
) -> Matrix:
    """w (E, N, K) as (E * K, N) along N, of what the forward operand stands for where the recipe says so."""
    if operand.source == "output" and forward.scheme is not None:
        w = fast.dequantize(_quantized(weight_operand(w, forward)), w.dtype).reshape(w.shape)
    return weight_operand(w.transpose(1, 2).contiguous(), operand, seed, stream)


def token_columns(
    x: torch.Tensor, rows: Matrix, operand: Operand, forward: Operand, layout: Layout, seed: int | None = None, stream: int = 0,
) -> Columns:  # fmt: skip
    """x (T, K) as (K, P), of what the forward operand `rows` stands for where the recipe says so."""
    if operand.source == "output" and forward.scheme is not None:
        x = fast.dequantize(_quantized(rows), x.dtype)
    return columns_operand(x, operand, layout, seed, stream)


def _fine(
    x: torch.Tensor, scheme: Scheme, block: int, shared: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Scheme, torch.Tensor]:
    """The scheme in blocks that lie within groups, and scales that `shared` has made the groups' own."""
    if scheme.outer is not None:
        return without_outer(scheme.key), scales_of_two_levels(x, scheme, shared)
    fine = in_blocks(scheme.key, block)
    found: torch.Tensor = fast.choose_scales(x, fine).scale
    return fine, shared(found)


@derived
def in_blocks(key: str, block: int) -> Scheme:
    """The record of a key in blocks of another length."""
    scheme = record_of(key)
    if scheme.scale.block == block:
        return scheme
    return replace(scheme, name=f"{scheme.name}_in_{block}", scale=replace(scheme.scale, block=block))


def _largest(
    scales: torch.Tensor, owners: torch.Tensor, experts: int, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (n, m) replaced by the largest of their group, for each of m or (whole) for all; and those of E groups.

    owners: (n,) the group of each row, E for none. NaN is the largest, so a group that has one is NaN.
    """
    scales = scales.amax(1, keepdim=True).expand_as(scales) if whole else scales
    index = owners[:, None].expand_as(scales)
    table = scales.new_zeros((experts + 1, scales.shape[1])).scatter_reduce(0, index, scales, "amax")
    return table[owners], table[:experts]


def _reaches_over_rows(scheme: Scheme) -> bool:
    block = scheme.scale.block
    return scheme.outer is not None or block == "tensor" or (isinstance(block, tuple) and block[0] > 1)


def _refuse_square(scheme: Scheme) -> None:
    """ValueError for blocks over several tokens, which no end of a group divides."""
    block = scheme.scale.block
    if isinstance(block, tuple) and block[0] > 1:
        raise ValueError(
            f"scheme {scheme.name} has blocks of {block}, over several tokens and over the ends of experts; "
            f"use it for weights, and blocks along the sum for tokens"
        )


def _quantized(matrix: Matrix) -> Quantized:
    if not isinstance(matrix, Quantized):
        raise TypeError(f"a quantized operand was expected, got a {type(matrix).__name__}")
    return matrix


__all__ = ["Columns", "columns_operand", "rows_operand", "token_columns", "weight_columns", "weight_operand"]
