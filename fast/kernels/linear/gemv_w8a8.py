"""y = W x + bias for a stored weight W (N, K) and one vector x that are both codes of 8 bits, in Gluon.

As `gemv_w8a16`, whose layout this is: a lane takes 16 neighbouring codes of each of its rows, and of the inputs the codes of
the same places once for all rows. Each operand has one scale in all, or the weight one for each row, so nothing is scaled
before the last sum:

    y[n] = (sum over k of (c[k] - z) w[n, k]) s s[n] + bias[n],

products from left to right, each of these operations rounded to float32. Integers are multiplied and added four at a time
(`dp4a`), exactly as long as int32 holds the sum; a zero point z is taken off as z times the sum of the weight's codes. Products
of floats are exact in float32, their sums fused multiply-adds: each thread's part in order, the parts of a row in a tree.

The last step of a row may be a part of one; codes beyond it are zeros of both operands.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.linear.gemv_w8a16 import TEXT_E4M3, TEXT_E5M2
from fast.kernels.linear.gluon import (
    axis_range,
    broadcast_to_tile,
    narrowed,
    row_of,
    wait_for_previous,
    word_of,
    words_of_rows,
)


def _decoded(kind: str) -> gl.constexpr:
    """Assembly: the four codes of the word $4 as float32."""
    text = "{ .reg .b16 a<2>, h<4>; .reg .b32 p<2>; mov.b32 {a0, a1}, $4; "
    for half in range(2):
        text += f"cvt.rn.f16x2.{kind}x2 p{half}, a{half}; mov.b32 {{h{2 * half}, h{2 * half + 1}}}, p{half}; "
    return gl.constexpr(text + "".join(f"cvt.f32.f16 ${i}, h{i}; " for i in range(4)) + "}")


DECODE_E4M3, DECODE_E5M2 = _decoded("e4m3"), _decoded("e5m2")
#: Assembly: $0 = $1 + the four codes of $2 times those of $3; and the four codes of $2 alone.
DOT, SUM = gl.constexpr("dp4a.s32.s32 $0, $2, $3, $1;"), gl.constexpr("dp4a.s32.s32 $0, $2, 0x01010101, $1;")


@gluon.jit
def _added(total, w, c, INPUT: gl.constexpr, KIND: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """total plus the products of words of the weight and of the inputs."""
    if KIND == "int":
        return gl.inline_asm_elementwise(
            DOT,
            "=r,r,r,r",
            [total, w, broadcast_to_tile(c, SHAPE, TILE, TILE)],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        DECODE: gl.constexpr = DECODE_E4M3 if INPUT == "e4m3" else DECODE_E5M2
        TEXT: gl.constexpr = TEXT_E4M3 if KIND == "e4m3" else TEXT_E5M2
        v0, v1, v2, v3 = gl.inline_asm_elementwise(
            DECODE, "=&f,=&f,=&f,=&f,r", [c],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return gl.inline_asm_elementwise(
            TEXT, "=&f,f,r,f,f,f,f",
            [
                total, w, broadcast_to_tile(v0, SHAPE, TILE, TILE), broadcast_to_tile(v1, SHAPE, TILE, TILE),
                broadcast_to_tile(v2, SHAPE, TILE, TILE),
                broadcast_to_tile(v3, SHAPE, TILE, TILE),
            ],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def gemv_w8a8_kernel(
    x, x_scale, x_zero, codes, scale, bias, y, rows,
    LENGTH: gl.constexpr, EACH: gl.constexpr, INPUT: gl.constexpr, KIND: gl.constexpr, ROWS: gl.constexpr,
    WARPS_K: gl.constexpr, WIDE: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """ROWS elements of y. rows: N; LENGTH: K, a multiple of 16; EACH: whether each row of the weight has a scale; INPUT, KIND:
    codes of the inputs and the weight, "int" both or "e4m3" or "e5m2"; WARPS_K: warps along K; USE_PDL: programmatic
    dependent launch, see `wait_for_previous`."""
    SHAPE: gl.constexpr = [WARPS_K, ROWS, 32, 4]
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    STEP: gl.constexpr = 128 * WARPS_K
    first = gl.program_id(0) * ROWS
    word = word_of(WARPS_K, TILE)
    words = words_of_rows(codes, row_of(first + axis_range(ROWS, 1, 4, TILE), rows, WIDE), word, LENGTH)
    inputs = x.to(gl.pointer_type(gl.int32), bitcast=True) + word
    wait_for_previous(USE_PDL)
    total = gl.zeros(SHAPE, gl.int32 if KIND == "int" else gl.float32, TILE)
    whole = gl.zeros(SHAPE, gl.int32, TILE)
    for turn in range(0, LENGTH // 4, STEP):
        if LENGTH // 4 % STEP == 0:
            w = gl.load(words + turn, eviction_policy="evict_first")
            c = gl.load(inputs + turn)
        else:
            inside = word + turn < LENGTH // 4
            w = gl.load(
                words + turn,
                mask=broadcast_to_tile(inside, SHAPE, TILE, TILE),
                other=0,
                eviction_policy="evict_first",
            )
            c = gl.load(inputs + turn, mask=inside, other=0)
        total = _added(total, w, c, INPUT, KIND, SHAPE, TILE)
        if x_zero is not None:
            whole = gl.inline_asm_elementwise(SUM, "=r,r,r", [whole, w], dtype=gl.int32, is_pure=True, pack=1)
    if x_zero is not None:
        total -= whole * gl.load(x_zero).to(gl.int32)
    made = gl.sum(gl.sum(gl.sum(total, axis=3), axis=2), axis=0)
    n = first + gl.arange(0, ROWS, layout=made.type.layout)
    inside = n < rows
    made = made.to(gl.float32) * gl.load(x_scale)
    made = made * gl.load(scale + (gl.minimum(n, rows - 1) if EACH else n * 0))
    if bias is not None:
        made += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
    gl.store(y + n, narrowed(made, DTYPE), mask=inside)
