"""Values of a tile of codes: the counterpart of `reference.dequantize`."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import narrow, read
from fast.kernels.rules.packing import load_packed
from fast.kernels.rules.scales import loaded_scale
from fast.kernels.rules.second_level import double_scale
from fast.kernels.rules.values import combined, loaded_zero, values
from fast.kernels.tile.fast_values import finished, load_values


@triton.jit
def dequantize_tile(
    codes, scale, outer, zero, y, at, inside, block, exists, SCHEME: tl.constexpr, OP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Read codes and scales, write the values that the operation asks for."""
    PRECISION: tl.constexpr = OP.output if SCHEME.dequantize == "target" else "float32"
    if OP.packed:
        SEQUENCE: tl.constexpr = SCHEME.bits == 4 or SCHEME.kind == "float" or SIZE % 32 == 0
    else:
        SEQUENCE: tl.constexpr = SCHEME.bits == 8 or SCHEME.kind == "int" or SCHEME.kind == "codebook"
    FAST_PATH: tl.constexpr = SCHEME.fast_values and SEQUENCE
    if FAST_PATH:
        code = block
    elif OP.packed:
        code = load_packed(codes, block, exists, SIZE, SCHEME.bits)
    else:
        code = read(codes + at, inside).to(tl.int32) & ((1 << SCHEME.bits) - 1)
    if SCHEME.two_level:
        s = double_scale(scale, outer, zero, block, exists, SCHEME, PRECISION)
    else:
        s = loaded_scale(read(scale + block, exists), SCHEME.level)
    z = s
    if SCHEME.zero != "":
        z = loaded_zero(read(zero + block, exists), SCHEME)
    o = tl.full((), 1.0, tl.float32)
    if SCHEME.has_outer:
        o = loaded_scale(tl.load(outer), SCHEME.outer)
    if FAST_PATH:
        c = combined(s, o, SCHEME, "float32")
        value = load_values(codes, at, inside, block, exists, z, SCHEME, OP.packed, SIZE)
        tl.store(y + at, finished(value * c, c, OP.output), mask=inside)
    else:
        value = values(code, combined(s, o, SCHEME, PRECISION), z, SCHEME, PRECISION)
        tl.store(y + at, narrow(value, OP.output, SCHEME.dequantize == "float32"), mask=inside)
