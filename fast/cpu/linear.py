"""One row of inputs times a stored weight on a CPU: codes become float32 numbers on the way, and nothing dense is kept.

All in float32, whatever the dtype of the inputs, so that CPUs without bfloat16 instructions lose nothing; bias, then one
rounding to the dtype of the inputs. Within `reference.linear_error_bound` of the exact product.

With Numba installed (`pip install numba`, a requirement of ao_lab's) a compiled loop decodes codes in registers (`gemv`): the
weight is read once, and layers take less time than dense ones. What it leaves, and machines without it, goes tile by tile
through torch operations: a tile of 4 MiB at a time is dequantized and multiplied.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import gcd
from typing import Any

import torch

from fast.cpu.decoding import TABLE, Decoding
from fast.cpu.dequantize import Tiles
from fast.cpu.elements import Element, largest, single_table
from fast.cpu.scales import BlockScales, covered
from fast.cpu.scratch import scratch
from fast.cpu.threads import in_parts
from reference import Quantized
from reference.schemes import Scheme

#: Sums below this are far from float32's end, 2**128.
FAR = 2.0**120


def takes(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether `linear_of_one_row` multiplies a weight (N, K) of this record, blocks along K, by inputs of a dtype."""
    return len(shape) == 2 and dtype in (torch.float32, torch.bfloat16, torch.float16) and covered(
        scheme, shape, 1, torch.float32
    )  # fmt: skip


def linear_of_one_row(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (1, K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype; ValueError where not `takes`."""
    if x.shape[0] != 1 or x.shape[1:] != w.shape[1:] or not takes(w.scheme, tuple(w.shape), torch.float32):
        raise ValueError(
            f"one row of {tuple(x.shape)} by {w.scheme.name} of shape {tuple(w.shape)}: takes one row (1, K), blocks along K, "
            f"elements of at most 8 bits; `fast.linear` takes others"
        )
    row = x.detach().to(torch.float32).resolve_neg()
    y = _by_loop(row, w) if numba_missing() is None else None
    y = _by_tiles(row, w) if y is None else y
    if bias is not None:
        y = y + bias.detach().to(torch.float32)
    return y.to(x.dtype)


@lru_cache(maxsize=1)
def numba_missing() -> str | None:
    """Why loops cannot be compiled: what importing Numba says; None if it can be imported."""
    try:
        import fast.cpu.gemv  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def _by_loop(row: torch.Tensor, w: Quantized) -> torch.Tensor | None:
    """Float32 (1, N), by `gemv`; None where its loop does not read a weight so stored, or sums might overflow."""
    scales = BlockScales.coded(w)
    if scales is None or not _stays_finite(row, w):
        return None
    launch = _launch(w, scales)
    if launch is None:
        return None
    kernel, in_group, long = launch
    y = torch.empty((1, w.shape[0]))
    element = Element.of(w.scheme)
    work = partial(
        kernel,
        _numpy(w.codes),
        _numpy(single_table(element) if Decoding.of(element).kind == TABLE else None),
        _numpy(scales.scale),
        _numpy(scales.table),
        _numpy(scales.zero, (1, 0)),
        _adds(w.scheme),
        scales.divides,
        long,
        _in_planes(row, in_group).numpy(),
        _numpy(None if scales.zero is None else _block_sums(row, scales.size).view(-1)),
    )
    out = y.view(-1).numpy()
    in_parts(lambda first, last: work(first, last, out), w.shape[0], w.shape[0] * w.shape[1])
    return y


def _launch(w: Quantized, scales: BlockScales) -> tuple[Any, int, int] | None:
    """The loop for a weight, the codes of its groups and the groups of its blocks; None where a group ends in no block."""
    from fast.cpu.gemv import WIDEST, compiled, group_of

    element, blocks = Element.of(w.scheme), scales.scale.shape[1]
    packed = w.packed and element.bits < 8
    in_group, size = group_of(element.bits) if packed else (1, 1)
    groups = -(-w.shape[1] // in_group)
    if groups * size != w.codes.shape[1] or (blocks > 1 and (scales.size % in_group or scales.divides)):
        return None
    long = scales.size // in_group if blocks > 1 else groups
    run = gcd(WIDEST, long) if blocks > 1 else 1
    return compiled(Decoding.of(element), packed, scales.table is not None, run), in_group, long


@lru_cache(maxsize=8)
def _nothing(shape: tuple[int, ...]) -> Any:
    """What stands for an operand that a weight does not have."""
    return torch.zeros(shape).numpy()


def _numpy(x: torch.Tensor | None, shape: tuple[int, ...] = (0,)) -> Any:
    return _nothing(shape) if x is None else x.detach().resolve_neg().contiguous().numpy()


def _in_planes(row: torch.Tensor, in_group: int) -> torch.Tensor:
    """A row of inputs (1, K) as (codes of a group, groups), zeros behind it up to a whole group."""
    short = -row.shape[1] % in_group
    row = torch.nn.functional.pad(row, (0, short)) if short else row
    return row.view(-1, in_group).t().contiguous()


def _stays_finite(row: torch.Tensor, w: Quantized) -> bool:
    """Whether sums of codes times inputs, not yet scaled, lie inside float32; not where an input is NaN or infinite."""
    most = largest(Element.of(w.scheme)) + (256 if w.zero is not None else 0)
    return float(row.abs().max()) * most * row.shape[1] < FAR


def _by_tiles(row: torch.Tensor, w: Quantized) -> torch.Tensor:
    """Float32 (1, N), by torch operations."""
    scales = BlockScales.of(w, torch.float32, checked=False)
    if scales is None:
        raise ValueError(f"{w.scheme.name} has no scales along rows of {tuple(w.shape)}")
    tiles = Tiles(w, scales.without_zero(), torch.float32)
    y = torch.empty((1, w.shape[0]))
    for first in range(0, w.shape[0], tiles.step):
        last = min(first + tiles.step, w.shape[0])
        part = scratch("tile", (last - first, w.shape[1]), torch.float32)
        tiles.write(first, last, part)
        torch.mm(row, part.t(), out=y[:, first:last])
    if scales.zero is None:
        return y
    # Zero points leave the sum: a product of (N, blocks) by the sums of inputs.
    factors = scales.zero if _adds(w.scheme) else -scales.zero * scales.scale
    return y + (factors @ _block_sums(row, scales.size)).view(1, -1)


def _adds(scheme: Scheme) -> bool:
    """Whether zero points are values that are added."""
    return scheme.zero is not None and scheme.zero.rule == "value"


def _block_sums(row: torch.Tensor, size: int) -> torch.Tensor:
    """Sums of the inputs (1, K) over each block, (blocks, 1)."""
    short = -row.shape[1] % size
    row = torch.nn.functional.pad(row, (0, short)) if short else row
    return row.view(-1, size).sum(1, keepdim=True)


__all__ = ["linear_of_one_row", "numba_missing", "takes"]
