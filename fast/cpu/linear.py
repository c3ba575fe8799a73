"""One row of inputs times a stored weight on a CPU: codes become float32 numbers tile by tile, and nothing dense is kept.

All in float32, whatever the dtype of the inputs, so that CPUs without bfloat16 instructions lose nothing:

    y[n] = sum over blocks b of s[n, b] (sum of c x) - s[n, b] z[n, b] (sum of x)   (+ z[n, b] (sum of x) where zero
    points are values),  + bias, then one rounding to the dtype of the inputs:

within `reference.linear_error_bound` of the exact product. One scale for each row multiplies the sums instead of the numbers.
Codes that are integers or floats take the order of `planes`, all else (and NaN) that of the tensor. A tile is 4 MiB; beside it
there are the scales as float32 while the call runs. Between calls each thread keeps its tile (`scratch`, at most 4 MiB a name).
"""

from __future__ import annotations

import torch

from fast.cpu.dequantize import TILE, Tiles
from fast.cpu.elements import Element
from fast.cpu.planes import Decoding, in_planes, multiplied, planes_of, scale_planes
from fast.cpu.scales import BlockScales, covered
from fast.cpu.scratch import scratch
from reference import Quantized
from reference.schemes import Scheme

#: Sums below this are far from float32's end, 2**128.
FAR = 2.0**100


def takes(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether `linear_of_one_row` multiplies a weight (N, K) of this record, blocks along K, by inputs of a dtype."""
    return len(shape) == 2 and dtype in (torch.float32, torch.bfloat16, torch.float16) and covered(
        scheme, shape, 1, torch.float32
    )  # fmt: skip


def linear_of_one_row(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (1, K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype; ValueError where not `takes`."""
    scales = BlockScales.of(w, torch.float32, checked=False)
    if scales is None or x.shape[0] != 1 or x.shape[1:] != w.shape[1:]:
        raise ValueError(
            f"one row of {tuple(x.shape)} by {w.scheme.name} of shape {tuple(w.shape)}: takes one row (1, K), blocks along K, "
            f"elements of at most 8 bits; `fast.linear` takes others"
        )
    row = x.detach().to(torch.float32)
    y = _product(row, w, scales)
    if bias is not None:
        y = y + bias.detach().to(torch.float32)
    return y.to(x.dtype)


def _product(row: torch.Tensor, w: Quantized, scales: BlockScales) -> torch.Tensor:
    """Float32 (1, N)."""
    one = scales.scale.shape[1] == 1
    adds = w.scheme.zero is not None and w.scheme.zero.rule == "value"
    y = torch.empty((1, w.shape[0]))
    if not _sum_planes(row, w, scales, y):
        _sum_tiles(row, w, scales, y)
    if one:
        y = y / scales.scale.view(1, -1) if scales.divides else y * scales.scale.view(1, -1)
    if scales.zero is None:
        return y
    # Zero points leave the sum: a product of (N, blocks) by the sums of inputs.
    sums = _block_sums(row, scales.size)
    factors = scales.zero if adds else -scales.zero * scales.scale
    return y + (factors @ sums).view(1, -1)


def _sum_planes(row: torch.Tensor, w: Quantized, scales: BlockScales, y: torch.Tensor) -> bool:
    """Write the sums into y (1, N); False where codes have to be looked up in tables (then y may hold anything)."""
    decoding, one = Decoding.of(Element.of(w.scheme)), scales.scale.shape[1] == 1
    if decoding is None or not _in_whole_planes(w, scales, decoding):
        return False
    # The power goes into sums where nothing can overflow before, else into inputs or scales, if it is exact there.
    late = decoding.power < 1 and _stays_finite(row, scales.scale, decoding)
    factors = row if one else scales.scale
    factors = factors if late else multiplied(factors, decoding.power)
    if factors is None:
        return False
    planes, codes = planes_of(decoding.bits), w.codes.detach().contiguous()
    groups = -(-w.shape[1] // planes)
    inputs = in_planes(factors if one else row, decoding.bits, planes * groups)
    step = max(1, TILE // max(planes * groups, 1))
    for first in range(0, len(codes), step):
        last = min(first + step, len(codes))
        if not decoding.decodes(codes[first:last]):
            return False
        part = scratch("tile", (planes, last - first, groups), torch.float32)
        decoding.write(codes[first:last], part)
        if not one:
            scale_planes(part, factors if len(factors) == 1 else factors[first:last])
        _add_up(inputs, part, y[:, first:last])
    if late:
        y.mul_(decoding.power)
    return True


def _stays_finite(row: torch.Tensor, scale: torch.Tensor, decoding: Decoding) -> bool:
    """Whether sums of bytes, not yet multiplied by the power, times scales times inputs lie far inside float32."""
    low, high = torch.aminmax(scale)
    most = max(abs(float(low)), abs(float(high)), 1.0)
    return float(row.abs().max()) * most * 256 * row.shape[1] < FAR and most < FAR


def _add_up(inputs: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Inputs (planes, 1, groups) times numbers (planes, rows, groups) into out (1, rows)."""
    if len(numbers) == 1:
        torch.mm(inputs[0], numbers[0].t(), out=out)
        return
    torch.sum(torch.bmm(inputs, numbers.transpose(1, 2)), 0, out=out)


def _in_whole_planes(w: Quantized, scales: BlockScales, decoding: Decoding) -> bool:
    """Whether codes fill their bytes, and blocks are made of whole groups of codes."""
    if scales.divides or not (w.packed or decoding.bits == 8):
        return False
    whole = w.shape[1] % scales.size == 0 and scales.size % planes_of(decoding.bits) == 0
    return scales.scale.shape[1] == 1 or whole


def _sum_tiles(row: torch.Tensor, w: Quantized, scales: BlockScales, y: torch.Tensor) -> None:
    tiles = Tiles(w, scales.without_zero(), torch.float32)
    rows = w.shape[0]
    for first in range(0, rows, tiles.step):
        last = min(first + tiles.step, rows)
        part = scratch("tile", (last - first, w.shape[1]), torch.float32)
        tiles.write(first, last, part, scaled=scales.scale.shape[1] > 1)
        torch.mm(row, part.t(), out=y[:, first:last])


def _block_sums(row: torch.Tensor, size: int) -> torch.Tensor:
    """Sums of the inputs (1, K) over each block, (blocks, 1)."""
    short = -row.shape[1] % size
    row = torch.nn.functional.pad(row, (0, short)) if short else row
    return row.view(-1, size).sum(1, keepdim=True)


__all__ = ["linear_of_one_row", "takes"]
