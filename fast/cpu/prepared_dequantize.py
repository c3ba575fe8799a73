"""`dequantize` of CPU tensors that lie alike, prepared once: what a layer that dequantizes its weight does in every call.

Structure (record, shape, dtypes, which parts there are) is looked at once and kept by `fast.dispatch` under the key of a call.
What is left for each call is what scales hold, and the loop (`fast.cpu.dequantize.Decoder`). Quickest are weights whose scales
are float32 as they are stored, with zero points that are codes or none (`Plan`): integers and floats of up to 8 bits by rows,
groups or tensors. None stands for what `fast.cpu.dequantize` has to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from fast.cpu.dequantize import NAMES, Decoder, as_array, loop_of, no_zero_points, numba_missing, table_of
from fast.cpu.elements import Element, has_infinities, largest, single_table
from fast.cpu.scales import covered
from fast.cpu.threads import WORTH, in_parts
from reference import Quantized
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

#: Elements of the smallest tensor that the loop decodes at once, of the smallest at all, and calls after which it does those.
LARGE, SMALLEST, SOON = 1 << 20, 1 << 14, 16
#: How often a loop was asked for by tensors that are not large.
ASKED: Counter[Any] = Counter()
Dequantize = Callable[..., torch.Tensor | None]


@dataclass(frozen=True)
class Plan:
    """kernels: the loop, and one that may write 0 for numbers of bfloat16 below 2**-126; blocks: rows and columns of scales;
    size: codes of a block; look: what rounds scales and finds their ends; reach: the largest number of a code; least: the
    smallest that is not 0; limit: of numbers; checks: whether a code may be NaN or infinite."""

    kernels: tuple[Callable[..., None], Callable[..., None]]
    shape: tuple[int, ...]
    dtype: torch.dtype
    table: Any
    blocks: tuple[int, int]
    size: int
    look: Callable[..., None]
    reach: float
    least: float
    limit: float
    checks: bool

    def __call__(
        self, codes: torch.Tensor, scale: torch.Tensor, outer: None = None, zero: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The dense tensor, in `dtype`; None where a number may leave the dtype, or is NaN."""
        return self.decoded(*self.arrays(codes, scale, zero))

    def arrays(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
    ) -> tuple[Any, Any, Any]:
        """Parts as the loop reads them: those that lie so in memory as they are, others copied."""
        zeros = no_zero_points() if zero is None else zero.detach().to(torch.float32).reshape(self.blocks)
        stored = codes.detach().reshape(-1, codes.shape[-1])
        return as_array(stored), as_array(scale.detach().reshape(-1)), as_array(zeros)

    def decoded(self, codes: Any, scale: Any, zero: Any) -> torch.Tensor | None:
        """The dense tensor of such parts; None as above."""
        result = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        rounded, ends = np.empty(scale.shape, np.float32), np.empty(2, np.float32)
        self.look(scale, rounded, ends)
        low, high = float(ends[0]), float(ends[1])
        if not self.reach * max(-low, high) < self.limit or (self.checks and low <= 0):
            return None
        kernel = self.kernels[low * self.least >= NORMAL]
        self._write(kernel, (codes, self.table, rounded.reshape(self.blocks), zero, self.size), result)
        return None if self.checks and has_nan(result) else result

    def _write(self, kernel: Any, operands: tuple[Any, ...], result: torch.Tensor) -> None:
        rows, elements = prod(self.shape[:-1]), result.numel()
        wide = result if self.dtype == torch.float32 else result.view(torch.uint16)
        out = wide.numpy().reshape(rows, self.shape[-1])
        if elements < 2 * WORTH:
            kernel(*operands, out, out, 0, rows)
            return

        def work(first: int, last: int) -> None:
            kernel(*operands, out, out[first:last], first, last)

        in_parts(work, rows, elements)


@dataclass(frozen=True)
class Decoded:
    """The same of scales that are codes, or of two levels: they are looked at in every call (`Decoder.of`)."""

    scheme: Scheme
    shape: tuple[int, ...]
    axis: int
    packed: bool
    dtype: torch.dtype

    def __call__(
        self, codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None = None, zero: torch.Tensor | None = None
    ) -> torch.Tensor | None:  # fmt: skip
        """The dense tensor, in `dtype`; None where the loop does not have the reference's bits."""
        q = Quantized(codes, scale, outer, zero, self.shape, self.axis, self.scheme, self.packed)
        decoder = Decoder.of(q, self.dtype)
        if decoder is None:
            return None
        result = torch.empty((decoder.rows, decoder.width), dtype=self.dtype, device="cpu")
        decoder.write(0, decoder.rows, result)
        return None if has_nan(result) else result.view(self.shape)


def has_nan(result: torch.Tensor) -> bool:
    """Whether a number is NaN or infinite, by the largest of their bits."""
    from fast.cpu.loops.rounding import compiled_largest

    half = result.dtype == torch.bfloat16
    bits = result.view(torch.int16 if half else torch.int32).numpy().reshape(-1, result.shape[-1])
    tops = np.empty(len(bits), bits.dtype)
    in_parts(partial(compiled_largest(half), bits, tops), len(bits), bits.size)
    return int(tops.max()) >= (0x7F80 if half else 0x7F800000)


#: float32's and bfloat16's smallest normal number.
NORMAL = 2.0**-126


def prepared(q: Quantized, name: str) -> Dequantize | None:
    """`dequantize` of tensors like q to the dtype of a name, called with codes, scale, outer scale and zero point; errors of
    `check_quantized`."""
    dtype = NAMES.get(name)
    if not isinstance(q.shape, tuple):
        return None  # refused by who dequantizes
    rows, length = prod(q.shape[:-1]), q.shape[-1] if q.shape else 0
    if (
        dtype not in (torch.float32, torch.bfloat16)
        or rows * length < SMALLEST
        or numba_missing() is not None
    ):
        return None
    check_quantized(q)
    parts = [part for part in (q.codes, q.scale, q.outer, q.zero) if part is not None]
    if any(part.device.type != "cpu" for part in parts) or q.tiled:
        return None
    return _plan(q, dtype, rows, length)


def _takes(q: Quantized) -> bool:
    """Whether scales and zero points are read as they are stored, blocks along the last axis."""
    scale, zero = q.scheme.scale, q.scheme.zero
    plain = isinstance(scale.block, int) or scale.block == "tensor"
    plain = plain and not scale.flat_size and q.scheme.outer is None
    plain = plain and (scale.storage, scale.stored) == ("float32", "decode")
    return plain and (zero is None or (zero.rule, zero.storage) == ("code", "int8"))


def _plan(q: Quantized, dtype: torch.dtype, rows: int, length: int) -> Plan | Decoded | None:
    """Where rows are as wide as the loop writes them, and once it is worth compiling."""
    if not covered(q.scheme, tuple(q.shape), q.axis, dtype):
        return None
    loop = loop_of(q.scheme, q.packed, q.scheme.scale.stored == "encode", dtype)
    key = loop, q.scheme.scale.block
    if rows * length >= LARGE:
        ASKED[key] = SOON
    ASKED[key] += 1
    if loop.width(length) != length or ASKED[key] <= SOON:
        return None
    if not _takes(q):
        return Decoded(q.scheme, tuple(q.shape), q.axis, q.packed, dtype)
    return _of_plain_scales(q, loop, dtype, rows)


def _of_plain_scales(q: Quantized, loop: Any, dtype: torch.dtype, rows: int) -> Plan | None:
    from fast.cpu.loops.ends import compiled_scales
    from fast.cpu.loops.gemm import compiled

    scheme, block, length = q.scheme, q.scheme.scale.block, q.shape[-1]
    size = length if block in (-1, "tensor") else int(block)  # type: ignore[arg-type]
    if length % size:
        return None
    loop = loop.of_blocks(size)
    element = Element.of(scheme)
    table = as_array(table_of(scheme, loop.rounds))
    magnitudes = single_table(element).abs()
    return Plan(
        kernels=(compiled(loop), compiled(replace(loop, flushes=loop.half))),
        shape=tuple(q.shape), dtype=dtype, table=table, blocks=(1 if block == "tensor" else rows, length // size), size=size,
        reach=largest(element) + (0 if q.zero is None else 256), least=_least(magnitudes, scheme),
        look=compiled_scales(loop.rounds), limit=torch.finfo(dtype).max / 2,
        checks=has_infinities(element) or bool(magnitudes.isnan().any()),
    )  # fmt: skip


def _least(magnitudes: torch.Tensor, scheme: Scheme) -> float:
    """The smallest number that is not 0; less a zero point it is an integer."""
    return 1.0 if scheme.zero is not None else float(magnitudes[magnitudes > 0].min())


__all__ = ["prepared"]
