"""y = W x + bias for a weight W (N, K) of 8-bit elements and one vector x, in Gluon.

Bound by reading the weight, if enough loads are in flight: a lane loads 16 neighbouring codes of each of its rows, and the
inputs of the same offsets once for all rows; it multiplies and adds in float32 (`gemv_any` has the formula). Four codes are
decoded at a time: integers by a pattern that adds the byte to 2**23, floats by the conversion to float16, which is exact.

Tile (WARPS_K, ROWS, 32 lanes, 4 words), a step of 512 WARPS_K along K:

    k          0 ..... 15 | 16 .... 31 | ... | 496 .. 511 | 512 ... | ...
    warp           0            0        ...       0           1
    lane           0            1        ...      31           0
    registers  4 words of a row times ROWS rows; 16 inputs

Layouts are explicit: no element changes its lane before the sums of a row do.

y = W x + bias for a stored weight W (N, K) and one vector x that are both codes of 8 bits, in Gluon.

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

from fast.kernels.triton_gemv.gluon import (
    as_scale,
    axis_range,
    broadcast_to_tile,
    gated_sums,
    narrowed,
    row_of,
    select_pointers,
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
def triton_gemv_w8a8_kernel(
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
    result = gl.sum(gl.sum(gl.sum(total, axis=3), axis=2), axis=0)
    n = first + gl.arange(0, ROWS, layout=result.type.layout)
    inside = n < rows
    result = result.to(gl.float32) * gl.load(x_scale)
    result = result * gl.load(scale + (gl.minimum(n, rows - 1) if EACH else n * 0))
    if bias is not None:
        result += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
    gl.store(y + n, narrowed(result, DTYPE), mask=inside)


def _int8_dot_asm() -> gl.constexpr:
    """Assembly: $0 = $1 + the word $2 of four two's complement bytes times $3 to $6."""
    text = "{ .reg .b32 w, t; .reg .f32 f; xor.b32 w, $2, 0x80808080; mov.f32 $0, $1; "
    for i in range(4):
        text += f"prmt.b32 t, w, 0x4B000000, 0x744{i}; mov.b32 f, t; add.rn.f32 f, f, 0fCB000080; "
        text += f"fma.rn.f32 $0, f, ${3 + i}, $0; "
    return gl.constexpr(text + "}")


def _float8_dot_asm(kind: str) -> gl.constexpr:
    """Assembly: the same for four codes of e4m3 or e5m2."""
    text = "{ .reg .b16 a<2>, h<4>; .reg .b32 p<2>; .reg .f32 f; mov.b32 {a0, a1}, $2; mov.f32 $0, $1; "
    for half in range(2):
        text += f"cvt.rn.f16x2.{kind}x2 p{half}, a{half}; mov.b32 {{h{2 * half}, h{2 * half + 1}}}, p{half}; "
    for i in range(4):
        text += f"cvt.f32.f16 f, h{i}; fma.rn.f32 $0, f, ${3 + i}, $0; "
    return gl.constexpr(text + "}")


TEXT_INT, TEXT_E4M3, TEXT_E5M2 = _int8_dot_asm(), _float8_dot_asm("e4m3"), _float8_dot_asm("e5m2")


@gluon.jit
def _inputs(pointers):
    """Sixteen neighbouring inputs of each lane (..., 16), float32: the first to fourth of each word."""
    v = gl.load(pointers).to(gl.float32)
    even, odd = gl.split(gl.reshape(v, [v.shape[0], v.shape[1], v.shape[2], 4, 2, 2]))
    v0, v2 = gl.split(even)
    v1, v3 = gl.split(odd)
    return v0, v1, v2, v3


@gluon.jit
def triton_gemv_w8a16_kernel(
    x, codes, scale, zero, bias, y, rows, per_row,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, BLOCK_ROWS: gl.constexpr, KIND: gl.constexpr, STORAGE: gl.constexpr,
    FACTOR: gl.constexpr, ROWS: gl.constexpr, WARPS_K: gl.constexpr, WIDE: gl.constexpr, DTYPE: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """ROWS elements of y; see `_dot_products`."""
    _store_rows(
        gl.program_id(0), x, codes, scale, zero, bias, y, rows, per_row, LENGTH, BLOCK, BLOCK_ROWS, KIND, STORAGE, FACTOR, ROWS,
        WARPS_K, WIDE, DTYPE, USE_PDL,
    )  # fmt: skip


@gluon.jit
def triton_gemv_w8a16_pair_kernel(
    x, codes, scale, zero, y, codes2, scale2, zero2, y2, rows, per_row,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, BLOCK_ROWS: gl.constexpr, KIND: gl.constexpr, STORAGE: gl.constexpr,
    FACTOR: gl.constexpr, ROWS: gl.constexpr, WARPS_K: gl.constexpr, WIDE: gl.constexpr, DTYPE: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """The same for two weights of `rows` rows, one after the other."""
    program, tiles = gl.program_id(0), (rows + (ROWS - 1)) // ROWS
    if program < tiles:
        _store_rows(
            program, x, codes, scale, zero, None, y, rows, per_row, LENGTH, BLOCK, BLOCK_ROWS, KIND, STORAGE, FACTOR, ROWS,
            WARPS_K,
            WIDE, DTYPE, USE_PDL,
        )  # fmt: skip
    else:
        _store_rows(
            program - tiles, x, codes2, scale2, zero2, None, y2, rows, per_row, LENGTH, BLOCK, BLOCK_ROWS, KIND, STORAGE,
            FACTOR,
            ROWS, WARPS_K, WIDE, DTYPE, USE_PDL,
        )  # fmt: skip


@gluon.jit
def triton_gemv_w8a16_swiglu_kernel(
    x, codes, scale, zero, codes2, scale2, zero2, y, rows, per_row,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, BLOCK_ROWS: gl.constexpr, KIND: gl.constexpr, STORAGE: gl.constexpr,
    FACTOR: gl.constexpr, ROWS: gl.constexpr, WARPS_K: gl.constexpr, WIDE: gl.constexpr, DTYPE: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """ROWS / 2 elements of silu(gate) * up, of two weights of `rows` rows: a program takes rows of both in turn."""
    result = _dot_products(
        gl.program_id(0) * (ROWS // 2), x, codes, scale, zero, codes2, scale2, zero2, rows, per_row, LENGTH, BLOCK, BLOCK_ROWS,
        KIND, STORAGE, FACTOR, ROWS, WARPS_K, WIDE, USE_PDL,
    )  # fmt: skip
    gate, up = gl.split(gl.reshape(result, [ROWS // 2, 2]))
    n = gl.program_id(0) * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=gate.type.layout)
    gl.store(y + n, gated_sums(gate, up, DTYPE), mask=n < rows)


@gluon.jit
def _store_rows(
    program, x, codes, scale, zero, bias, y, rows, per_row,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, BLOCK_ROWS: gl.constexpr, KIND: gl.constexpr, STORAGE: gl.constexpr,
    FACTOR: gl.constexpr, ROWS: gl.constexpr, WARPS_K: gl.constexpr, WIDE: gl.constexpr, DTYPE: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """ROWS elements of y, those of a program."""
    first = program * ROWS
    result = _dot_products(
        first, x, codes, scale, zero, None, None, None, rows, per_row, LENGTH, BLOCK, BLOCK_ROWS, KIND, STORAGE, FACTOR, ROWS,
        WARPS_K, WIDE, USE_PDL,
    )  # fmt: skip
    n = first + gl.arange(0, ROWS, layout=result.type.layout)
    inside = n < rows
    if bias is not None:
        result += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
    gl.store(y + n, narrowed(result, DTYPE), mask=inside)


@gluon.jit
def _dot_products(
    first, x, codes, scale, zero, codes2, scale2, zero2, rows, per_row,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, BLOCK_ROWS: gl.constexpr, KIND: gl.constexpr, STORAGE: gl.constexpr,
    FACTOR: gl.constexpr, ROWS: gl.constexpr, WARPS_K: gl.constexpr, WIDE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """ROWS products in float32, of rows `first` and following; with a second weight of half as many rows, each of both weights
    in turn. rows: N; per_row: blocks in a row of them; LENGTH: K; BLOCK: elements of a block along K, 0 for one scale a
    row, -1 for one in all; BLOCK_ROWS: rows of a block; KIND: "int", "e4m3" or "e5m2"; STORAGE: of scales; FACTOR: of codes;
    WARPS_K: warps along K; USE_PDL: launched before the kernel in front of it has ended."""
    SHAPE: gl.constexpr = [WARPS_K, ROWS, 32, 4]
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [WARPS_K, 1, 1], [2, 1, 0])
    INPUT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 16], [1, 1, 32, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    TEXT: gl.constexpr = TEXT_INT if KIND == "int" else TEXT_E4M3 if KIND == "e4m3" else TEXT_E5M2
    STEP: gl.constexpr = 512 * WARPS_K
    # Rows of the weight, and the weight, by the index of a product.
    EACH: gl.constexpr = 1 if codes2 is None else 2
    i, word = axis_range(ROWS, 1, 4, TILE), word_of(WARPS_K, TILE)
    row = row_of(first + i // EACH, rows, WIDE)
    words = words_of_rows(codes, row, word, LENGTH)
    if codes2 is not None:
        words = select_pointers(words, words_of_rows(codes2, row, word, LENGTH), i % 2)
    inputs = x + (
        (axis_range(WARPS_K, 0, 4, INPUT) * 32 + axis_range(32, 2, 4, INPUT)) * 16
        + axis_range(16, 3, 4, INPUT)
    )
    start = (axis_range(WARPS_K, 0, 3, LANES) * 32 + axis_range(32, 2, 3, LANES)) * 16
    j = axis_range(ROWS, 1, 3, LANES)
    blocks = row_of(first + j // EACH, rows, WIDE) // BLOCK_ROWS * per_row
    wait_for_previous(USE_PDL)
    total = gl.zeros(SHAPE, gl.float32, TILE)
    scaled = gl.zeros([WARPS_K, ROWS, 32], gl.float32, LANES)
    for turn in range(0, LENGTH, STEP):
        w = gl.load(words + turn // 4, eviction_policy="evict_first")
        v0, v1, v2, v3 = _inputs(inputs + turn)
        added = gl.zeros(SHAPE, gl.float32, TILE) if BLOCK > 0 else total
        added = gl.inline_asm_elementwise(
            TEXT, "=&f,f,r,f,f,f,f",
            [
                added, w, broadcast_to_tile(v0, SHAPE, TILE, TILE), broadcast_to_tile(v1, SHAPE, TILE, TILE),
                broadcast_to_tile(v2, SHAPE, TILE, TILE),
                broadcast_to_tile(v3, SHAPE, TILE, TILE),
            ],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        if BLOCK > 0:
            at = blocks + (start + turn) // BLOCK
            sums = gl.convert_layout(gl.sum(added, axis=3), LANES, assert_trivial=True)
            if zero is not None:
                whole = broadcast_to_tile(
                    gl.sum(v0 + v1 + v2 + v3, axis=3), [WARPS_K, ROWS, 32], LANES, LANES
                )
                sums = sums - gl.load(_of(zero, zero2, at, j)).to(gl.float32) * whole
            scaled += sums * as_scale(gl.load(_of(scale, scale2, at, j)), STORAGE)
        else:
            total = added
    if BLOCK > 0:
        result = gl.sum(gl.sum(scaled, axis=2), axis=0)
    else:
        result = gl.sum(gl.sum(gl.sum(total, axis=3), axis=2), axis=0)
    if BLOCK <= 0:
        n = gl.arange(0, ROWS, layout=result.type.layout)
        at = gl.minimum(first + n // EACH, rows - 1) if BLOCK == 0 else n * 0
        result = result * as_scale(gl.load(_of(scale, scale2, at, n)), STORAGE)
    return result * FACTOR


@gluon.jit
def _of(one, other, at, i):
    """Pointers to values of the weight that product i is of."""
    return select_pointers(one + at, None if other is None else other + at, i % 2)
