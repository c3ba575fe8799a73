"""Operands of the three products of a training step, quantized by `fast`; `reference.training.linear.operands` says the bits.

What both copies of a tensor share is read once where their schemes are the same (`fast.quantize_both`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fast
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from fast.dispatch import has_kernels, runs_eagerly
from fast.layers.hadamard import hadamard
from reference import Quantized, Scales, Scheme
from reference.formats.encode import random_bits
from reference.training.recipe import Operand

#: A matrix in the tensor's own dtype, or its codes and scales.
Matrix = torch.Tensor | Quantized
#: Streams of random bits: the place of an operand among x, w, g, w.T, g.T and x.T.
STREAMS = {name: at for at, name in enumerate(("x", "w", "g", "w.T", "g.T", "x.T"))}
#: The scales of a matrix of which this rank holds a part, in a scheme: those of the whole matrix. None: the part's own.
FindScales = Callable[[torch.Tensor, Scheme], Scales] | None


def quantize_one(
    x: torch.Tensor,
    operand: Operand,
    seed: int | None = None,
    stream: int = 0,
    find_scales: FindScales = None,
) -> Matrix:
    """A matrix along its last axis."""
    if operand.hadamard:
        x = hadamard(x, operand.hadamard)
    if operand.scheme is None:
        return x
    scales = None if find_scales is None else find_scales(x, operand.scheme)
    q = fast.quantize(x, operand.scheme, scales=scales, random_bits=words(x, operand, seed, stream))
    return of_record(q, operand.scheme)


def of_record(q: Quantized, scheme: Scheme) -> Quantized:
    """q with the very record that was asked for. Under a tracer operators give an equal one of no origin, whose key not every
    version of torch can read."""
    if not torch.compiler.is_compiling():
        return q
    return Quantized(q.codes, q.scale, q.outer, q.zero, q.shape, q.axis, scheme)


def quantize_two(
    x: torch.Tensor,
    rows: Operand,
    columns: Operand,
    seed: int | None = None,
    streams: tuple[int, int] = (0, 0),
    find_scales: tuple[FindScales, FindScales] = (None, None),
) -> tuple[Matrix, Matrix]:
    """x (M, K) along K, and x.T (K, M) along M."""
    scheme = rows.scheme
    if columns.source == "output" and scheme is not None:
        own = quantize_one(x, rows, seed, streams[0], find_scales[0])
        return own, from_rows(own, columns, x.dtype, seed, streams[1], find_scales[1])
    if scheme is None or find_scales != (None, None) or not reads_once(rows, columns):
        own = quantize_one(x, rows, seed, streams[0], find_scales[0])
        return own, quantize_one(x.t(), columns, seed, streams[1], find_scales[1])
    drawn = None
    if scheme.rounding == "stochastic":
        drawn = words(x, rows, seed, streams[0]), words(x.t(), columns, seed, streams[1])
    first, second = fast.quantize_both(x, scheme, random_bits=drawn)
    return of_record(first, scheme), of_record(second, scheme)


def reads_once(rows: Operand, columns: Operand) -> bool:
    """Whether a matrix and its transpose are quantized alike, so that one read of it serves both."""
    same = rows.scheme is columns.scheme or rows.scheme == columns.scheme
    return same and not rows.hadamard and not columns.hadamard


def from_rows(
    rows: Matrix,
    columns: Operand,
    dtype: torch.dtype,
    seed: int | None = None,
    stream: int = 0,
    find_scales: FindScales = None,
) -> Matrix:
    """The transposed matrix along its last axis, from what the matrix's codes stand for."""
    x = fast.dequantize(rows, dtype) if isinstance(rows, Quantized) else rows
    return quantize_one(x.t(), columns, seed, stream, find_scales)


def weight_rows(
    w: torch.Tensor, operand: Operand, find_scales: FindScales = None, seed: int | None = None
) -> Matrix:
    """w (N, K) along K; a weight that came as codes (FSDP2's FP8 all-gather) as it is."""
    if isinstance(w, QuantizedTensor):
        return w.quantized
    return quantize_one(own_memory(w), operand, seed, STREAMS["w"], find_scales)


def weight_columns(
    w: torch.Tensor,
    rows: Operand,
    columns: Operand,
    find_scales: tuple[FindScales, FindScales] = (None, None),
    seed: int | None = None,
) -> Matrix:
    """w.T (K, N) along N; of a weight that came as codes from these, which with one scale in all are those of w.T."""
    if isinstance(w, QuantizedTensor):
        q = w.quantized
        if columns.scheme == q.scheme and q.scheme.scale.block == "tensor":
            return Quantized(transposed(q.codes), q.scale, None, None, q.shape[::-1], 1, q.scheme)
        return from_rows(q, columns, w.dtype, seed, STREAMS["w.T"])
    w = own_memory(w)
    if columns.source == "output" and rows.scheme is not None:
        return quantize_two(w, rows, columns, seed, (STREAMS["w"], STREAMS["w.T"]), find_scales)[1]
    return quantize_one(w.t(), columns, seed, STREAMS["w.T"], find_scales[1])


def own_memory(w: torch.Tensor) -> torch.Tensor:
    """On a CPU a copy: the reference reads tensors as NumPy arrays, and memory that NumPy has seen torch does not give back,
    as FSDP2 does between layers."""
    return w.clone() if w.device.type == "cpu" else w


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The transposed matrix of bytes, contiguous; TypeError for elements of another size, whose bytes would be torn apart."""
    if x.element_size() != 1:
        raise TypeError(
            f"transposed takes a matrix of one-byte codes, got {x.dtype} of shape {tuple(x.shape)}; use x.t().contiguous()"
        )
    if not runs_eagerly(x) or not has_kernels(x):
        return x.t().contiguous()
    from fast.kernels.rowwise_colwise.turned import turned_bytes

    return turned_bytes(x)


def words(x: torch.Tensor, operand: Operand, seed: int | None, stream: int) -> torch.Tensor | None:
    """Random bits for x where the operand is rounded stochastically: those of `reference.random_bits`, drawn on a GPU."""
    if operand.scheme is None or operand.scheme.rounding != "stochastic":
        return None
    shape, seed = tuple(x.shape), 0 if seed is None else seed
    if has_kernels(x):
        from fast.kernels.encode import random_words

        return random_words(shape, seed, stream, x.device)
    return torch.from_numpy(random_bits(shape, seed=seed, stream=stream)).to(x.device)


def quantized(matrix: Matrix) -> Quantized:
    """A matrix that has to be one of codes."""
    if not isinstance(matrix, Quantized):
        raise TypeError(f"a quantized matrix was expected, got a {type(matrix).__name__}")
    return matrix


def parts(matrix: Matrix) -> tuple[list[torch.Tensor | None], Any]:
    """The tensors of a matrix, and what makes it of them again."""
    if isinstance(matrix, torch.Tensor):
        return [matrix], None
    return [matrix.codes, matrix.scale, matrix.outer, matrix.zero], (matrix.shape, matrix.axis, matrix.scheme)


def joined(tensors: list[Any], settings: Any) -> Matrix:
    """The matrix of `parts`."""
    if settings is None:
        dense: torch.Tensor = tensors[0]
        return dense
    return Quantized(*tensors, *settings)
