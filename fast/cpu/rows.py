"""Rows of inputs times a stored weight on a CPU: the weight is decoded on the way, a part at a time, and nothing dense is kept.

One row is multiplied as `fast.cpu.linear` says. Of several, up to `FEW`, a compiled loop decodes a few rows of the weight into
the first cache and multiplies them there, which reads the weight once as it is stored; of more, the loop decodes a few MiB at a
time, and torch multiplies. Operands are bfloat16 where the inputs are and this CPU multiplies it, else float32: the weight has
the bits of `reference.dequantize` in that dtype. Sums are float32 in any order; bias, then one rounding to the inputs' dtype.
"""

from __future__ import annotations

import torch
from torch.nn import functional

import reference
from fast.cpu.capability import cpu_capability
from fast.cpu.decoder import Decoder, multiplies_bfloat16, numba_missing
from fast.cpu.dequantize import dequantize
from fast.cpu.linear import check_operands, linear_of_one_row, takes
from fast.cpu.scratch import KEPT, scratch
from reference import Quantized
from reference.schemes.schemes import Scheme

#: Elements of the smallest weight that is decoded on the way by several rows: one that is smaller is soon dequantized.
SMALLEST = 1 << 17
#: Rows that the loop multiplies at most.
FEW = 64
#: The same where the processor has matrix tiles (AMX), which the loop does not use.
FEW_BESIDE_TILES = 8
#: The same in float32 where torch multiplies bfloat16, and the loop does not.
FEW_BESIDE_BFLOAT16 = 4


def takes_rows(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether `linear_of_rows` multiplies a weight (N, K) of this record by any number of rows without making it dense."""
    return takes(scheme, shape, dtype) and shape[0] * shape[1] >= SMALLEST


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
    if len(x) <= _few(dtype):
        y = decoder.multiply(x.to(dtype))
        return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)
    return _by_tiles(x.to(dtype), decoder, bias).to(x.dtype)


def _operands(x: torch.Tensor) -> torch.dtype:
    """The dtype that inputs and weight are multiplied in."""
    if x.dtype != torch.bfloat16 or not cpu_capability().bfloat16 or numba_missing() is not None:
        return torch.float32
    few = not multiplies_bfloat16() and len(x) <= FEW_BESIDE_BFLOAT16
    return torch.float32 if few else torch.bfloat16


def _few(dtype: torch.dtype) -> int:
    """The most rows that the loop multiplies in a dtype."""
    if dtype == torch.float32:
        return FEW
    if not multiplies_bfloat16():
        return 0
    return FEW_BESIDE_TILES if cpu_capability().amx else FEW


def _by_tiles(x: torch.Tensor, decoder: Decoder, bias: torch.Tensor | None) -> torch.Tensor:
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


__all__ = ["SMALLEST", "linear_of_rows", "takes_rows"]
