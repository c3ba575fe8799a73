"""Y = X W' + bias for a weight W (N, K) of 4-bit integers in 2:4 storage and a few rows X (M, K), on the sparse tensor core.

A warp takes TILES times 16 rows of the weight and, of every turn along K, CHUNKS times 128 columns. Codes and metadata go from
memory, as they are stored, to the instructions of `assembly` in the lane that read them. Its eight columns are rows of X, and
where a scale covers fewer than 128 columns also the parts of those: column c is row c // PARTS with the inputs of part c % PARTS
and zeros in place of others, so that each sum has one scale.

    PARTS = max(1, 128 / g); lanes of four that read a part: 4 / PARTS

Order of additions, in float32: the tensor core's over four instructions of 128 columns from zero, one fused multiply-add with
the scale to the sum of before, warps in a tree, parts in a tree, the bias, and one rounding. Codes are exact, and so are
products: nothing is added to them, unlike in `gemv_w4a16`, whose offsets are the same for all rows.

Rows of X beyond the last are the last one again, rows of W too; neither is stored. What lies beyond K reads as zeros, with
indices that exist.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.linear.gluon import as_words, axis_range, narrowed, wait_for_previous
from fast.kernels.sparse_linear.assembly import DECODE_OPERANDS, PRODUCT_OPERANDS, decode_asm, products_asm

#: Columns of a turn of one warp, of a lane in it, and rows of an instruction; columns of it.
TURN, PART, ROWS, COLUMNS = gl.constexpr(128), gl.constexpr(32), gl.constexpr(16), gl.constexpr(8)
#: Assembly by (bfloat16).
DECODE = gl.constexpr([decode_asm(kind) for kind in ("f16", "bf16")])
PRODUCTS = gl.constexpr([products_asm(kind) for kind in ("f16", "bf16")])
DECODED, MULTIPLIED = gl.constexpr(DECODE_OPERANDS), gl.constexpr(PRODUCT_OPERANDS)
#: Indices 2, 3 in every group.
NOTHING_KEPT = gl.constexpr(-286331154)


@gluon.jit
def mma_sparse_kernel(
    x, codes, metadata, scale, bias, y, count, rows,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WARPS_K: gl.constexpr, CHUNKS: gl.constexpr, TILES: gl.constexpr,
    SUMS: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """A tile of Y, SUMS * 8 / PARTS rows by 16 * TILES. count, rows: M, N; LENGTH: K, a multiple of 32; BLOCK: columns of a
    scale, 32, 64 or a multiple of 128; WARPS_K: warps along K; USE_PDL: launched before the kernel in front of it has
    ended."""
    SHAPE: gl.constexpr = [WARPS_K, 32, 4]
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS_K, 1, 1], [2, 1, 0])
    PARTS: gl.constexpr = 1 if BLOCK >= TURN else TURN // BLOCK
    SPAN: gl.constexpr = TURN * CHUNKS
    WHOLE: gl.constexpr = LENGTH % (SPAN * WARPS_K) == 0
    IS_BF16: gl.constexpr = DTYPE == "bfloat16"
    first = gl.program_id(0) * (ROWS * TILES)
    begun = gl.program_id(1) * (SUMS * COLUMNS // PARTS)
    lane, place = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
    k = axis_range(WARPS_K, 0, 3, TILE) * SPAN + lane * 0
    turned = (4 * (lane % 4 - place) + axis_range(WARPS_K, 0, 3, TILE) * 0) & 31
    total = ()
    for _ in gl.static_range(TILES * SUMS):
        total = total + (gl.zeros(SHAPE, gl.float32, TILE),)  # noqa: RUF005, Gluon has no unpacking
    wait_for_previous(USE_PDL)
    for at in range(0, LENGTH, SPAN * WARPS_K):
        for chunk in gl.static_range(CHUNKS):
            now = k + (at + TURN * chunk)
            inputs = ()
            for column in gl.static_range(SUMS):
                for register in gl.static_range(4):
                    v = _inputs(x, begun, column, register, now, count, LENGTH, PARTS, WHOLE, TILE)
                    inputs = inputs + (v,)  # noqa: RUF005
            made = ()
            for tile in gl.static_range(TILES):
                c, m0, m1 = _stored(codes, metadata, first + ROWS * tile, now, rows, LENGTH, WHOLE, TILE)
                s = _scales(scale, first + ROWS * tile, at + TURN * chunk, rows, LENGTH, BLOCK, PARTS, WARPS_K, SPAN, WHOLE, TILE)
                a0, a1, a2, a3, e = gl.inline_asm_elementwise(
                    DECODE[IS_BF16], DECODED, [c, m0, m1, turned],
                    dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=4,
                )  # fmt: skip
                for column in gl.static_range(SUMS):
                    added = gl.inline_asm_elementwise(
                        PRODUCTS[IS_BF16], MULTIPLIED,
                        [
                            a0, a1, a2, a3, e,
                            inputs[4 * column], inputs[4 * column + 1], inputs[4 * column + 2], inputs[4 * column + 3],
                        ],
                        dtype=gl.float32, is_pure=True, pack=4,
                    )  # fmt: skip
                    made = made + (gl.fma(added, s, total[tile * SUMS + column]),)  # noqa: RUF005
            total = made
    for tile in gl.static_range(TILES):
        for column in gl.static_range(SUMS):
            _store(
                total[tile * SUMS + column], bias, y, first + ROWS * tile, begun + column * (COLUMNS // PARTS), count, rows,
                PARTS, DTYPE,
            )  # fmt: skip


@gluon.jit
def _stored(
    codes, metadata, first, k, rows, LENGTH: gl.constexpr, WHOLE: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Words of codes (0 and 1 of row g, of row g + 8), and the four words of metadata of either row."""
    lane, place = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
    last, begun = rows - 1 - first, first.to(gl.int64)
    row = gl.minimum(lane // 4 + place // 2 * 8, last)
    words = as_words(codes) + begun * (LENGTH // 16) + (row * (LENGTH // 16) + (k // 16 + lane % 4 * 2 + place % 2))
    one, other = gl.minimum(lane // 4, last), gl.minimum(lane // 4 + 8, last)
    indices = as_words(metadata) + begun * (LENGTH // 32)
    one, other = indices + (one * (LENGTH // 32) + (k // 32 + place)), indices + (other * (LENGTH // 32) + (k // 32 + place))
    if WHOLE:
        c = gl.load(words, eviction_policy="evict_first")
        return c, gl.load(one, eviction_policy="evict_first"), gl.load(other, eviction_policy="evict_first")
    else:
        inside = k + PART * place < LENGTH
        c = gl.load(words, mask=k + PART * (lane % 4) + place * 0 < LENGTH, other=0)
        return c, gl.load(one, mask=inside, other=NOTHING_KEPT), gl.load(other, mask=inside, other=NOTHING_KEPT)


@gluon.jit
def _inputs(
    x, begun, COLUMN: gl.constexpr, REGISTER: gl.constexpr, k, count, LENGTH: gl.constexpr, PARTS: gl.constexpr,
    WHOLE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Register REGISTER of B, of the four instructions of a turn: pairs of inputs of column 8 COLUMN + g."""
    lane, place = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
    column = COLUMNS * COLUMN + lane // 4
    # The lane whose codes the register meets, of its groups the one in the half that the register has, and a half of that.
    reader = lane % 4 // 2 + REGISTER % 2 * 2
    row = gl.minimum(begun + column // PARTS, count - 1)
    begin = k + (PART * reader + 4 * (REGISTER // 2) + 2 * (lane % 2)) + 8 * place
    pairs = as_words(x) + (row * (LENGTH // 2) + begin // 2)
    if PARTS == 1 and WHOLE:
        return gl.load(pairs)
    else:
        own = reader // (4 // PARTS) == column % PARTS
        return gl.load(pairs, mask=own & (begin < LENGTH), other=0)


@gluon.jit
def _scales(
    scale, first, at, rows, LENGTH: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, WARPS_K: gl.constexpr,
    SPAN: gl.constexpr, WHOLE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The scale of each sum of a lane: rows g and g + 8, columns 2 t and 2 t + 1."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 2, 2], [1, 32, 1, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    # Columns of a lane that have a scale each.
    APART: gl.constexpr = 1 if PARTS == 1 else 2
    lane, half = axis_range(32, 1, 4, LAYOUT), axis_range(2, 2, 4, LAYOUT)
    row = gl.minimum(lane // 4 + half * 8, rows - 1 - first)
    part = (lane % 4 * 2 + axis_range(APART, 3, 4, LAYOUT)) % PARTS
    begin = axis_range(WARPS_K, 0, 4, LAYOUT) * SPAN + (at + TURN // PARTS * part)
    blocks = scale + first.to(gl.int64) * (LENGTH // BLOCK) + (row * (LENGTH // BLOCK) + begin // BLOCK)
    if WHOLE:
        s = gl.load(blocks)
    else:
        s = gl.load(blocks, mask=begin + row * 0 < LENGTH, other=0.0)
    s = gl.broadcast(s.to(gl.float32), gl.zeros([WARPS_K, 32, 2, 2], gl.int32, LAYOUT))[0]
    return gl.convert_layout(gl.reshape(s, [WARPS_K, 32, 4]), TILE, assert_trivial=True)


@gluon.jit
def _store(total, bias, y, first, begun, count, rows, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """16 rows of the weight by 8 / PARTS rows of X, of sums (warps, 32 lanes, rows g and g + 8 by columns 2 t and 2 t + 1)."""
    made = gl.sum(total, axis=0)
    if PARTS > 1:
        made = gl.sum(gl.reshape(made, [8, 4, 2, 2]), axis=3)
    if PARTS > 2:
        made = gl.sum(gl.reshape(made, [8, 2, 2, 2]), axis=2)
    APART: gl.constexpr = 8 // PARTS
    made = gl.reshape(made, [ROWS * APART])
    i = gl.arange(0, ROWS * APART, layout=made.type.layout)
    if PARTS == 1:
        n, m = i // 16 + i // 2 % 2 * 8, i // 4 % 4 * 2 + i % 2
    else:
        n, m = i // (2 * APART) + i % 2 * 8, i // 2 % APART
    n, m = first + n, begun + m
    inside = (n < rows) & (m < count)
    if bias is not None:
        made += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
    gl.store(y + (m.to(gl.int64) * rows + n), narrowed(made, DTYPE), mask=inside)
