"""Values of a tile of codes: the counterpart of `reference.dequantize`."""

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
    codes, scale, outer, zero, y, at, inside, block, exists, RULE: tl.constexpr, JOB: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Read codes and scales, write the values that the operation asks for."""
    PRECISION: tl.constexpr = JOB.output if RULE.dequantize == "target" else "float32"
    if JOB.packed:
        SEQUENCE: tl.constexpr = RULE.bits == 4 or RULE.kind == "float" or SIZE % 32 == 0
    else:
        SEQUENCE: tl.constexpr = RULE.bits == 8 or RULE.kind == "int" or RULE.kind == "codebook"
    HOT: tl.constexpr = RULE.hot_values and SEQUENCE
    if HOT:
        code = block
    elif JOB.packed:
        code = load_packed(codes, block, exists, SIZE, RULE.bits)
    else:
        code = read(codes + at, inside).to(tl.int32) & ((1 << RULE.bits) - 1)
    if RULE.two_level:
        s = double_scale(scale, outer, zero, block, exists, RULE, PRECISION)
    else:
        s = loaded_scale(read(scale + block, exists), RULE.level)
    z = s
    if RULE.zero != "":
        z = loaded_zero(read(zero + block, exists), RULE)
    o = tl.full((), 1.0, tl.float32)
    if RULE.has_outer:
        o = loaded_scale(tl.load(outer), RULE.outer)
    if HOT:
        c = combined(s, o, RULE, "float32")
        value = load_values(codes, at, inside, block, exists, z, RULE, JOB.packed, SIZE)
        tl.store(y + at, finished(value * c, c, JOB.output), mask=inside)
    else:
        value = values(code, combined(s, o, RULE, PRECISION), z, RULE, PRECISION)
        tl.store(y + at, narrow(value, JOB.output, RULE.dequantize == "float32"), mask=inside)
