"""Rows of codes of 8 bits with the row's scale behind them, as they travel between ranks (`ao_lab.all_to_all_rows`).

`join_rows` quantizes and writes a row's codes and its scale side by side; `split_rows` reads such rows and dequantizes. Each is
one launch, where codes and scales by themselves would be copied together, and apart again. Codes and scales are `quantize`'s,
values `dequantize`'s, bit for bit: tiles are those of the block kernel, and what is done with a tile is that kernel's code.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast import dispatch
from fast.kernels.bits import narrow, read
from fast.kernels.quantize import host
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.kernel import all_of
from fast.kernels.quantize.plan import Pass, Plan
from fast.kernels.rules.scales import loaded_scale
from fast.kernels.rules.values import combined, values
from fast.kernels.tile.fast_codes import finished, load_values
from fast.kernels.tile.quantize import quantize_tile
from fast.launch.launcher import Call, CompiledLaunch
from reference import Scheme

#: Bytes of a scale.
SCALE = 4


@triton.jit
def row_places(
    count, LENGTH: tl.constexpr, PITCH: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """(offsets in a matrix (P, SIZE), offsets in joined rows, which exist, rows (P, 1), which exist)."""
    row = tl.program_id(0) * P + tl.arange(0, P)[:, None]
    i = tl.arange(0, SIZE)[None, :]
    inside = all_of(SIZE, P)
    if MASKED:
        inside = (row < count) & (i < LENGTH)
    row = row.to(tl.int64) if WIDE else row
    return row * LENGTH + i, row * PITCH + i, inside, row, row < count


@triton.jit
def join_rows_kernel(
    x, joined, count, stride, LENGTH: tl.constexpr, PITCH: tl.constexpr, SCHEME: tl.constexpr, OP: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """joined (count, PITCH), uint8, of x (count, LENGTH)."""
    at, out, inside, row, exists = row_places(count, LENGTH, PITCH, MASKED, WIDE, SIZE, P)
    scale = (joined + LENGTH).to(tl.pointer_type(tl.float32), bitcast=True)
    quantize_tile(
        read(x + at, inside), None, None, joined, scale, None, None, None, None, None, out, inside, row * (PITCH // 4),
        exists, True, stride, SCHEME, OP,
    )  # fmt: skip


@triton.jit
def split_rows_kernel(
    joined, y, count, LENGTH: tl.constexpr, PITCH: tl.constexpr, SCHEME: tl.constexpr, OP: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """y (count, LENGTH) of joined (count, PITCH): the counterpart of `kernel.dequantize_tile`."""
    at, place, inside, row, exists = row_places(count, LENGTH, PITCH, MASKED, WIDE, SIZE, P)
    scale = (joined + LENGTH).to(tl.pointer_type(tl.float32), bitcast=True)
    s = loaded_scale(read(scale + row * (PITCH // 4), exists), SCHEME.level)
    one = tl.full((), 1.0, tl.float32)
    PRECISION: tl.constexpr = OP.output if SCHEME.dequantize == "target" else "float32"
    if SCHEME.fast_values:
        c = combined(s, one, SCHEME, "float32")
        value = load_values(joined, place, inside, row, exists, s, SCHEME, False, SIZE)
        tl.store(y + at, finished(value * c, c, OP.output), mask=inside)
    else:
        code = read(joined + place, inside).to(tl.int32) & 255
        value = values(code, combined(s, one, SCHEME, PRECISION), s, SCHEME, PRECISION)
        tl.store(y + at, narrow(value, OP.output, SCHEME.dequantize == "float32"), mask=inside)


def covers(scheme: Scheme, width: int) -> bool:
    """Whether rows of a width are codes of 8 bits with one float32 scale, which begins at a multiple of its size."""
    plain = scheme.outer is None and scheme.zero is None and scheme.rounding == "nearest_even"
    one = scheme.format.bits == 8 and scheme.scale.block == -1 and scheme.scale.storage == "float32"
    return plain and one and width % SCALE == 0 and width > 0


def join_rows(x: torch.Tensor, scheme: Scheme) -> torch.Tensor | None:
    """Rows of x (count, width) as bytes (count, width + 4): codes and scale of `quantize`; None where no kernel makes them."""
    key = dispatch.key_of("join_rows", scheme, (), (x,))
    known = dispatch.find(key)
    made: torch.Tensor | None = None if known is None else known(x)
    if made is not None or not covers(scheme, x.shape[1]):
        return made
    of = host.problem_of(x, scheme, -1)
    step = None if of is None else _whole_rows(plans.quantizing(of))
    if step is None:
        return None
    call, (count, width) = Call({"x": x}), x.shape
    call.allocate("joined", (count, width + SCALE), torch.uint8)
    call.launch(
        _launch(join_rows_kernel, step, (count, step.place.integers[-1], width, width + SCALE)),
        ["x", "joined"],
    )
    result: torch.Tensor = call.result("joined", key, scheme)
    return result


def split_rows(joined: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor | None:
    """Values of rows that `join_rows` made, in dtype, as `dequantize` has them; None where no kernel makes them."""
    key = dispatch.key_of("split_rows", scheme, (dtype,), (joined,))
    known = dispatch.find(key)
    made: torch.Tensor | None = None if known is None else known(joined)
    count, width = joined.shape[0], joined.shape[1] - SCALE
    if made is not None or not covers(scheme, width):
        return made
    of = host.problem_of(joined.new_empty((), dtype=dtype).expand(count, width), scheme, -1)
    step = None if of is None else _whole_rows(plans.dequantizing(of))
    if step is None:
        return None
    call = Call({"joined": joined})
    call.allocate("y", (count, width), dtype)
    call.launch(_launch(split_rows_kernel, step, (count, width, width + SCALE)), ["joined", "y"])
    result: torch.Tensor = call.result("y", key, scheme)
    return result


def _whole_rows(plan: Plan) -> Pass | None:
    """The one pass of a plan whose tiles are whole rows; None for others."""
    step = plan.passes[-1]
    whole = len(plan.passes) == 1 and step.place.shape == "flat" and not step.place.chunked
    return step if whole and not (step.block_op.packed or step.block_op.pairs) else None


def _launch(kernel: Any, step: Pass, numbers: tuple[int, ...]) -> CompiledLaunch:
    place = step.place
    tail = (*numbers, step.rule, step.block_op, place.masked, place.wide, place.size, place.p)
    return CompiledLaunch(kernel, place.programs, tail, place.warps)
