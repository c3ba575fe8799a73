"""Inputs times a stored weight on a CPU, which is decoded on the way; nothing dense is kept.

One row: all in float32, whatever the dtype of the inputs, so that CPUs without bfloat16 instructions lose nothing; bias, then
one rounding to the dtype of the inputs. Within `reference.linear_error_bound` of the exact product.

With Numba a compiled loop decodes codes in registers (`gemv`): the weight is read once, and a layer of 2048 x 2048 takes about
the time of a dense one, or less. What that loop leaves, and machines without Numba, goes tile by tile through torch operations:
a tile of 4 MiB at a time is dequantized, to the reference's bits, and multiplied.

`integer_sums`: sums of products of signed bytes, exact in int32, on any instructions. `torch._int_mm` goes to oneDNN, which
without VNNI adds pairs of products in 16 bits, and those saturate: of random bytes up to 127 every sum may be wrong, and
nothing says so. float32 holds every integer up to 2**24, which the sum of 1024 products of bytes does not pass, so parts of
that length are exact in any order.

Of several rows, up to `LOOP_ROWS`, a compiled loop decodes a few rows of the weight into
the first cache and multiplies them there, which reads the weight once as it is stored; of more, the loop decodes a few MiB at a
time, and torch multiplies. Operands are bfloat16 where the inputs are and this CPU multiplies it, else float32: the weight has
the bits of `reference.dequantize` in that dtype. Sums are float32 in any order; bias, then one rounding to the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import reference
from fast.cpu.capability import cpu_capability
from fast.cpu.dequantize import Decoder, Tiles, as_array, dequantize, multiplies_bfloat16, numba_missing
from fast.cpu.elements import Decoding, Element, largest, single_table
from fast.cpu.scales import DTYPES, BlockScales, covered, scale_table
from fast.cpu.threads import KEPT, in_parts, scratch
from reference import Quantized
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

#: Sums below this are far from float32's end, 2**128.
FAR = 2.0**120


def takes(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether `linear_of_rows` multiplies a weight (N, K) of this record, blocks along K, by any number of rows of a dtype."""
    return len(shape) == 2 and dtype in DTYPES and covered(scheme, shape, 1, torch.float32)


def check_operands(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> None:
    """ValueError where inputs (M, K), a weight (N, K) and a bias (N) do not go together, or the weight is not taken."""
    shape = tuple(w.shape)
    if x.dim() != 2 or x.shape[1:] != shape[1:] or w.axis % 2 != 1 or not takes(w.scheme, shape, x.dtype):
        raise ValueError(_unsupported_message(x, w))
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} for {shape[0]} outputs: one number for each output"
        )


def _unsupported_message(x: torch.Tensor, w: Quantized) -> str:
    """What `check_operands` says: of lengths that differ what `reference.linear` says, as the path with a gradient does."""
    shape, inputs = tuple(w.shape), tuple(x.shape)
    if len(shape) == 2 and inputs and inputs[-1] != shape[1]:
        return f"linear of inputs {inputs} and a weight {shape}: the last axes must be the same"
    return (
        f"inputs {inputs} in {x.dtype} by {w.scheme.name} of shape {shape}, blocks along axis {w.axis}: takes inputs (M, K) in "
        f"float32, bfloat16 or float16, blocks along K, elements of at most 8 bits; `fast.linear` takes others"
    )


def linear_of_one_row(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (1, K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype; ValueError where not `takes`."""
    check_operands(x, w, bias)
    if len(x) != 1:
        raise ValueError(f"linear_of_one_row takes one row, got inputs {tuple(x.shape)}")
    row = x.detach().to(torch.float32).resolve_neg()
    y = _by_loop(row, w) if numba_missing() is None else None
    y = _by_tiles(row, w) if y is None else y
    return _with_bias(y, bias, x.dtype)


def _by_loop(row: torch.Tensor, w: Quantized) -> torch.Tensor | None:
    """Float32 (1, N), by `gemv`; None where its loop does not read a weight so stored, or something might overflow."""
    scales = BlockScales.coded(w)
    loop = RowLoop.of(w, scales)
    return None if loop is None else loop(row, loop.operands(w, scales))


@dataclass(frozen=True)
class RowLoop:
    """`gemv` of weights (N, K) that lie alike. look: finds the ends of inputs and scales; numbers: of the codes; reach: the
    largest magnitude of a code, less a zero point; adds: whether zero points are values that are added; divides, size: as of
    `BlockScales`."""

    kernel: Callable[..., None]
    look: Callable[..., None]
    numbers: Any
    reach: float
    adds: bool
    divides: bool
    size: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, w: Quantized, scales: BlockScales) -> RowLoop | None:
        """That of a weight whose record is taken (`takes`) and its scales (`BlockScales.coded`); None where a group ends in no
        block."""
        from fast.cpu.loops.ends import compiled_look

        _check_rows(w, scales)
        kernel = _row_kernel(w, scales)
        if kernel is None:
            return None
        element, adds, shape = Element.of(w.scheme), _adds(w.scheme), (w.shape[0], w.shape[1])
        reach = largest(element) + (256 if w.zero is not None else 0)
        look, table = compiled_look(scales.table is not None), as_array(single_table(element))
        return cls(kernel, look, table, reach, adds, scales.divides, scales.size, shape)

    def operands(self, w: Quantized, scales: BlockScales) -> tuple[Any, ...]:
        """What a kernel takes of a weight: codes, scales, their table and zero points, its own memory where it reads that."""
        zero = _nothing((1, 0)) if scales.zero is None else as_array(scales.zero)
        table = _nothing((0,)) if scales.table is None else as_array(scales.table)
        return as_array(w.codes), as_array(scales.scale), table, zero

    def __call__(self, row: torch.Tensor, operands: tuple[Any, ...]) -> torch.Tensor | None:
        """Float32 (1, N) of inputs (1, K) in float32; None where something might overflow."""
        codes, scale, table, zero = operands
        inputs, out = as_array(row.view(-1)), np.empty(self.shape[0], np.float32)
        if not self._stays_finite(inputs, scale, table, zero):
            return None
        flags = self.adds, self.divides, self.size

        def work(first: int, last: int) -> None:
            self.kernel(codes, self.numbers, scale, table, zero, *flags, inputs, first, last, out)

        in_parts(work, self.shape[0], prod(self.shape))
        return torch.from_numpy(out).view(1, -1)

    def _stays_finite(self, inputs: Any, scale: Any, table: Any, zero: Any) -> bool:
        """Whether all that the loop computes lies inside float32: sums of codes times inputs before they are scaled, and what
        dequantization would have to saturate. Not where a scale or an input is NaN or infinite."""
        ends = np.empty(4, np.float32)
        self.look(
            inputs, scale.reshape(-1), table, (zero if self.adds else _nothing((1, 0))).reshape(-1), ends
        )
        x, most, least, added = ends.tolist()
        if self.divides:
            most = 1 / least if least and most < FAR else inf
        sums, reach = x * self.shape[1], self.reach
        return reach * most + added < FAR and sums * max(reach, reach * most, added) < FAR


def _check_rows(w: Quantized, scales: BlockScales) -> None:
    """ValueError where parts do not belong to one weight: the loop looks at no lengths."""
    if not _rows_agree(w, scales):
        check_quantized(w)
        raise ValueError(
            f"codes and scales of {w.scheme.name} do not have the {w.shape[0]} rows of {tuple(w.shape)}"
        )


def _rows_agree(w: Quantized, scales: BlockScales) -> bool:
    rows = 1 if w.scheme.scale.block == "tensor" else w.shape[0]
    same = scales.zero is None or scales.zero.shape == scales.scale.shape
    return same and w.codes.dim() == 2 and len(w.codes) == w.shape[0] and len(scales.scale) == rows


def _row_kernel(w: Quantized, scales: BlockScales) -> Callable[..., None] | None:
    """The loop for a weight; None where a group ends in no block."""
    from fast.cpu.loops.gemv import Row, compiled, group_of

    element, blocks = Element.of(w.scheme), scales.scale.shape[1]
    packed = w.packed and element.bits < 8
    in_group, size = group_of(element.bits) if packed else (1, 1)
    whole = -(-w.shape[1] // in_group) * size == w.codes.shape[1]
    if not whole or (blocks > 1 and (scales.size % in_group or scales.divides)):
        return None
    long = scales.size // in_group if blocks > 1 else 0
    zero_codes = scales.zero is not None and scales.zero.dtype == torch.int8
    return compiled(Row.of(Decoding.of(element), packed, _scale_kind(w.scheme, scales), long, zero_codes))


def _scale_kind(scheme: Scheme, scales: BlockScales) -> int:
    """What the loop takes scales for: codes that it decodes, or entries of a table where it would divide them."""
    from fast.cpu.loops.row_sums import E4M3, E8M0, ENTRIES, NUMBERS

    if scales.table is None:
        return NUMBERS
    storage, outer = scheme.scale.storage, scheme.outer is not None
    if storage == "float8_e8m0fnu" and not outer:
        return E8M0
    return E4M3 if storage == "float8_e4m3fn" and not (outer and scheme.outer_order == "encode") else ENTRIES


@lru_cache(maxsize=8)
def _nothing(shape: tuple[int, ...]) -> Any:
    """What stands for an operand that a weight does not have."""
    return np.zeros(shape, np.float32)


@torch.no_grad()
def _by_tiles(row: torch.Tensor, w: Quantized) -> torch.Tensor:
    """Float32 (1, N): the row times what the reference dequantizes, by torch operations."""
    y = torch.empty((1, w.shape[0]), dtype=torch.float32, device="cpu")
    check_quantized(w)
    scales = BlockScales.of(w, torch.float32)
    if scales is None:
        dense: torch.Tensor = reference.dequantize(w, dtype="float32")
        return torch.mm(row, dense.detach().t(), out=y)
    tiles = Tiles(w, scales, torch.float32)
    for first in range(0, w.shape[0], tiles.step):
        last = min(first + tiles.step, w.shape[0])
        part = scratch("tile", (last - first, w.shape[1]), torch.float32)
        tiles.write(first, last, part)
        torch.mm(row, part.t(), out=y[:, first:last])
    return y


def _adds(scheme: Scheme) -> bool:
    """Whether zero points are values that are added."""
    return scheme.zero is not None and scheme.zero.rule == "value"


#: Rows that the loop multiplies at most.
LOOP_ROWS = 64
#: The same where the processor has matrix tiles (AMX), which the loop does not use.
LOOP_ROWS_BESIDE_TILES = 8
#: The same in float32 where torch multiplies bfloat16, and the loop does not.
FLOAT32_ROWS = 4


@torch.no_grad()
def linear_of_rows(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype; ValueError where not `takes`.

    A row of the result has the same bits beside any other rows, while the loop multiplies them and there is more than one.
    """
    if x.dim() == 2 and len(x) == 1:
        return linear_of_one_row(x, w, bias)
    check_operands(x, w, bias)
    if not len(x):
        return x.new_empty((0, w.shape[0]))
    dtype = _operands(x)
    decoder = Decoder.of(w, dtype)
    if decoder is None:
        return _by_dense(x, w, bias)
    return _by_decoder(x, decoder, bias, len(x) <= _loop_rows(dtype))


def _by_decoder(x: torch.Tensor, decoder: Decoder, bias: torch.Tensor | None, by_loop: bool) -> torch.Tensor:
    """By the loop, or by torch of what it decodes."""
    rows = x.to(decoder.dtype)
    if by_loop:
        return _with_bias(decoder.multiply(rows), bias, x.dtype)
    return _rows_by_tiles(rows, decoder, bias).to(x.dtype)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Float32 sums plus a bias, rounded once."""
    return (y if bias is None else y + bias.detach().to(torch.float32)).to(dtype)


def _operands(x: torch.Tensor) -> torch.dtype:
    """The dtype that inputs and weight are multiplied in."""
    if x.dtype != torch.bfloat16 or not cpu_capability().bfloat16 or numba_missing() is not None:
        return torch.float32
    in_float32 = not multiplies_bfloat16() and len(x) <= FLOAT32_ROWS
    return torch.float32 if in_float32 else torch.bfloat16


def _loop_rows(dtype: torch.dtype) -> int:
    """The most rows that the loop multiplies in a dtype."""
    if dtype == torch.float32:
        return LOOP_ROWS
    if not multiplies_bfloat16():
        return 0
    return LOOP_ROWS_BESIDE_TILES if cpu_capability().amx else LOOP_ROWS


def _rows_by_tiles(x: torch.Tensor, decoder: Decoder, bias: torch.Tensor | None) -> torch.Tensor:
    """(M, N) in x's dtype, which is the decoder's: torch multiplies some decoded rows at a time."""
    y = torch.empty((len(x), decoder.rows), dtype=x.dtype, device="cpu")
    step = max(1, KEPT // (decoder.width * x.element_size()))
    for first in range(0, decoder.rows, step):
        last = min(first + step, decoder.rows)
        tile = scratch("tile", (last - first, decoder.width), x.dtype)
        decoder.write(first, last, tile)
        part, out = tile[:, : decoder.length].t(), y[:, first:last]
        if bias is None:
            torch.mm(x, part, out=out)
        else:
            torch.addmm(bias[first:last].to(x.dtype), x, part, out=out)
    return y


def _by_dense(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """By torch, of what the reference dequantizes in the inputs' dtype."""
    name = str(x.dtype).removeprefix("torch.")
    dense = dequantize(w, name)
    dense = reference.dequantize(w, name) if dense is None else dense
    return functional.linear(x, dense, None if bias is None else bias.to(x.dtype))


#: `linear_of_rows` of inputs (M, K) and a bias by a weight; None where that goes another way than it was prepared for.
PreparedRows = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]


def prepared_rows(x: torch.Tensor, w: Quantized) -> PreparedRows | None:
    """`linear_of_rows` of inputs like x (M, K) by a weight (N, K), its loop looked up once; None where it has none.

    Where the loop reads the weight where it lies (`_lies`), all that is kept follows what is written there; of others the loop
    is made in every call.
    """
    if x.dim() != 2 or not len(x) or numba_missing() is not None or x.dtype not in DTYPES:
        return None
    check_operands(x, w, None)
    way = way_of(x)
    return _prepared_row(w) if way is None else _prepared_several(w, *way)


def way_of(x: torch.Tensor) -> tuple[torch.dtype, bool] | None:
    """What inputs (M, K), one row or more, share with all that go the same way: the dtype of operands, and whether the loop
    multiplies; None for one row."""
    if len(x) == 1:
        return None
    dtype = _operands(x)
    return dtype, len(x) <= _loop_rows(dtype)


def _prepared_row(w: Quantized) -> PreparedRows | None:
    scales = BlockScales.coded(w)
    loop = RowLoop.of(w, scales)
    if loop is None:
        return None
    operands = loop.operands(w, scales)
    lies = _all_lie(w, operands)

    def multiply(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        now = operands
        if not lies:
            now = loop.operands(w, BlockScales.coded(w))
        elif w.outer is not None:
            now = (*operands[:2], as_array(scale_table(w)), operands[3])
        y = loop(x.to(torch.float32).resolve_neg(), now)
        return None if y is None else _with_bias(y, bias, x.dtype)

    return multiply


def _all_lie(w: Quantized, operands: tuple[Any, ...]) -> bool:
    """Whether codes, scales and zero points of a loop are the memory of a weight's, so that what is written there is read."""
    codes, scale, _, zero = operands
    parts = [(codes, w.codes), (scale, w.scale)] + ([] if w.zero is None else [(zero, w.zero)])
    return all(array.__array_interface__["data"][0] == part.data_ptr() for array, part in parts)


def _prepared_several(w: Quantized, dtype: torch.dtype, by_loop: bool) -> PreparedRows | None:
    """dtype: of the operands; by_loop: whether the loop multiplies, else torch."""
    decoder = Decoder.of(w, dtype)
    if decoder is None:
        return None
    kept = decoder if _lies(w, decoder.operands[0], decoder.operands[2]) else None

    def multiply(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        again = Decoder.of(w, dtype) if kept is None else kept
        if again is None or (again is kept and not again.scales.is_plain(w.scheme, dtype)):
            return None
        return _by_decoder(x, again, bias, by_loop)

    return multiply


def _lies(w: Quantized, codes: Any, scales: Any) -> bool:
    """Whether a loop's arrays are the memory of a weight's codes and scales, and it has no more parts."""
    at = [array.__array_interface__["data"][0] for array in (codes, scales)]
    return w.outer is None and w.zero is None and at == [w.codes.data_ptr(), w.scale.data_ptr()]


#: Products whose sum float32 holds: 1024 * 128 * 128 = 2**24.
EXACT = 1024
#: Asked once, when this is imported: tracers cannot ask.
HAS_VNNI = cpu_capability().int8


def integer_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) times b (K, N), both int8, in int32 (M, N); exact where sums fit int32."""
    if HAS_VNNI:
        return torch._int_mm(a, b)
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32, device=a.device)
    for first in range(0, a.shape[1], EXACT):
        part = slice(first, first + EXACT)
        total = total + torch.mm(a[:, part].to(torch.float32), b[part].to(torch.float32)).to(torch.int32)
    return total


__all__ = [
    "PreparedRows",
    "check_operands",
    "integer_sums",
    "linear_of_one_row",
    "linear_of_rows",
    "prepared_rows",
    "takes",
    "way_of",
]
