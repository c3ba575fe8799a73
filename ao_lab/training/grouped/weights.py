"""Weights of experts as operands: every expert a matrix of its own, along either axis, without a copy of a transpose.

A weight that lies along the other axis (the transposed view of a contiguous batch) is read by kernels that turn tiles
(`fast.kernels.rowwise_colwise.host.batch_columns`); where none serves, of a copy: the same bits.
"""

from __future__ import annotations

import torch

import fast
from ao_lab.training.casts import Matrix, of_record, quantize_one, words
from ao_lab.training.grouped.blocks import fine_scales, in_blocks
from fast.device import has_kernels, is_traced, is_transformed
from fast.layers.hadamard import hadamard
from fast.quantize.ops import fresh_codes, fresh_scales
from reference import Quantized, Scheme
from reference.schemes.record_text import record_of
from reference.training.recipe import Operand


def weight_operand(w: torch.Tensor, operand: Operand, seed: int | None = None, stream: int = 0) -> Matrix:
    """w (E, R, C) along C as (E * R, C): every expert as a matrix of its own.

    A dense one whose experts do not lie one after the other stays (E, R, C).
    """
    if operand.scheme is None and not operand.hadamard and not w.is_contiguous():
        return w
    if _turns(w, operand):
        return _of_turned(w.transpose(1, 2), operand)
    return _of_rows(w, operand, seed, stream)


def weight_columns(
    w: torch.Tensor, operand: Operand, forward: Operand, seed: int | None = None, stream: int = 0
) -> Matrix:
    """w (E, N, K) as (E * K, N) along N, of what the forward operand stands for where the recipe says so."""
    if operand.source == "output" and forward.scheme is not None:
        w = fast.dequantize(quantized(weight_operand(w, forward)), w.dtype).reshape(w.shape)
    return weight_operand(w.transpose(1, 2), operand, seed, stream)


def quantized(matrix: Matrix) -> Quantized:
    """An operand that has to be one of codes."""
    if not isinstance(matrix, Quantized):
        raise TypeError(f"a quantized operand was expected, got a {type(matrix).__name__}")
    return matrix


def _of_rows(w: torch.Tensor, operand: Operand, seed: int | None, stream: int) -> Matrix:
    """Of the experts' rows one after the other, copied where they do not lie so."""
    experts, rows, length = w.shape
    flat, scheme = w.reshape(experts * rows, length), operand.scheme
    if scheme is None or (scheme.outer is None and scheme.scale.block != "tensor"):
        return quantize_one(flat, operand, seed, stream)
    flat = hadamard(flat, operand.hadamard) if operand.hadamard else flat

    def shared(found: torch.Tensor) -> torch.Tensor:
        largest = found.reshape(experts, -1).amax(1, keepdim=True)
        return largest.expand(experts, found.numel() // experts).reshape(found.shape).contiguous()

    fine, scales = fine_scales(flat, scheme, -1, shared)
    made = fast.quantize(flat, fine, scales=scales, random_bits=words(flat, operand, seed, stream))
    return of_record(made, fine)


def _turns(w: torch.Tensor, operand: Operand) -> bool:
    """Whether w is the transposed view of a contiguous batch, and nothing is mixed or drawn."""
    scheme = operand.scheme
    if scheme is None or operand.hadamard or operand.is_stochastic or scheme.outer is not None:
        return False
    return scheme.zero is None and not w.is_contiguous() and w.transpose(1, 2).is_contiguous()


def _of_turned(x: torch.Tensor, operand: Operand) -> Matrix:
    """The columns of each matrix of a contiguous batch x (E, R, C), along R."""
    scheme = operand.scheme
    if scheme is None:
        raise ValueError("a scheme is missing")
    codes, scale = _columns_op(x, scheme.key) if is_traced(x) or is_transformed() else _columns(x, scheme)
    return Quantized(codes, scale, None, None, tuple(codes.shape), 1, _own_scales(scheme))


def _own_scales(scheme: Scheme) -> Scheme:
    """The scheme with a scale for each row where it has one for the tensor."""
    return in_blocks(scheme.key, -1) if scheme.scale.block == "tensor" else scheme


def _columns(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, by kernels or of a copy."""
    x = x.detach()
    if has_kernels(x):
        from fast.kernels.rowwise_colwise.host import batch_columns

        made = batch_columns(x, scheme)
        if made is not None:
            return made
    matrix = quantized(_of_rows(x.transpose(1, 2), Operand(scheme=scheme), None, 0))
    return matrix.codes, matrix.scale


@torch.library.custom_op("ao_lab::batch_columns", mutates_args=())
def _columns_op(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    return list(_columns(x, record_of(scheme)))


@_columns_op.register_fake
def _columns_fake(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    record, shape = record_of(scheme), (x.shape[0] * x.shape[2], x.shape[1])
    own = _own_scales(record)
    return [fresh_codes(x, shape, own, False), *fresh_scales(x, own, -1, False, shape)]


__all__ = ["quantized", "weight_columns", "weight_operand"]
