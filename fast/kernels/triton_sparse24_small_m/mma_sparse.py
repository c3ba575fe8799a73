"""Y = X W' + bias for a weight W (N, K) of 4-bit integers in 2:4 storage and a few rows X (M, K), on the sparse tensor core.

A warp takes TILES times 16 rows of the weight and, of every turn along K, CHUNKS times 128 columns. Codes and metadata go
from memory, as they are stored, to the instructions of `assembly` in the lane that read them. Its eight columns are rows of
X, and where a scale covers fewer than 128 columns also the parts of those: column c is row c // PARTS with the inputs of part
c % PARTS and zeros in place of others, so that each sum has one scale.

    PARTS = max(1, 128 / g); lanes of four that read a part: 4 / PARTS

Order of additions, in float32: the tensor core's over four instructions of 128 columns from zero, one fused multiply-add with
the scale to the sum of before, warps in a tree, parts in a tree, the bias, and one rounding. Codes are exact, and so are
products: nothing is added to them, unlike in `gemv_w4a16`, whose offsets are the same for all rows.

That is within `reference.linear_error_bound`, which counts 2 K roundings of 2**-24 of a sum's magnitudes: an instruction cuts a
product that is not zero, and the accumulator, by one of them, the delivered sum by two, so that 128 columns lose
4 (16 + 3) = 76 (where the instruction is two of half its depth, 88) of 256, and fewer columns, down to 32, 4 (K / 8 + 6) of
2 K. Multiply-adds, at most K / 128 of them for a warp, and trees, at most 6 more, have the rest.

X is read in place, or as `arrange` has laid it out, to the same bits. Rows of X beyond the last are the last one again, rows of
W too; neither is stored. What lies beyond K reads as zeros, with indices that exist.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.triton_gemv.gluon import as_words, axis_range, narrowed, wait_for_previous
from fast.kernels.triton_sparse24_small_m import assembly
from fast.kernels.triton_sparse24_small_m.assembly import (
    DECODE_OPERANDS,
    PRODUCT_OPERANDS,
    decode_asm,
    products_asm,
)
from fast.kernels.triton_sparse24_small_m.weight_reads import PART, ROWS, TURN, read_weight, weight_pointers

#: Columns of an instruction.
COLUMNS = gl.constexpr(8)
#: Words of a column tile of a turn where X is arranged.
WORDS_OF_TURN = gl.constexpr(512)
#: Assembly by (bfloat16).
DECODE = gl.constexpr([decode_asm(kind) for kind in ("f16", "bf16")])
PRODUCTS = gl.constexpr([products_asm(kind) for kind in ("f16", "bf16")])
DECODED, MULTIPLIED = gl.constexpr(DECODE_OPERANDS), gl.constexpr(PRODUCT_OPERANDS)
#: What a lane has to know.
BYTES, DOWN, UP = gl.constexpr(assembly.BYTES), gl.constexpr(assembly.DOWN), gl.constexpr(assembly.UP)


@gluon.jit
def triton_sparse24_small_m_kernel(
    x, codes, metadata, scale, bias, y, count, rows,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WARPS_K: gl.constexpr, CHUNKS: gl.constexpr, AHEAD: gl.constexpr,
    TILES: gl.constexpr, SUMS: gl.constexpr, FEW: gl.constexpr, ARRANGED: gl.constexpr, WIDE: gl.constexpr,
    STORAGE: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """A tile of Y, SUMS * 8 / PARTS rows by 16 * TILES. count, rows: M, N; LENGTH: K, a multiple of 32; BLOCK: columns of a
    scale, 32, 64, 128 or 256; WARPS_K: warps along K; AHEAD: whether what a step has of the weight is read one step before;
    FEW: N is below 16, and TILES 1, else N is at least 16 * TILES; ARRANGED: x is what `arrange` made of it; WIDE: reads of two
    turns (`weight_reads`), CHUNKS even, K a multiple of 256, BLOCK 64 at least; STORAGE: of scales, float32 or bfloat16, which
    may come as patterns; USE_PDL: launched before the kernel in front of it has ended."""
    SHAPE: gl.constexpr = [WARPS_K, 32, 4]
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS_K, 1, 1], [2, 1, 0])
    READ: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [WARPS_K, 1, 1], [2, 1, 0]) if WIDE else TILE
    # Columns that four lanes read, of one scale each part.
    ALL: gl.constexpr = 2 * TURN if WIDE else TURN
    PARTS: gl.constexpr = 1 if BLOCK >= ALL else ALL // BLOCK
    SPAN: gl.constexpr = TURN * CHUNKS
    STEP: gl.constexpr = SPAN * WARPS_K
    STEPS: gl.constexpr = (LENGTH + STEP - 1) // STEP
    WHOLE: gl.constexpr = LENGTH % STEP == 0
    IS_BF16: gl.constexpr = DTYPE == "bfloat16"
    # The last program takes rows again where they are no multiple of its own.
    first = gl.program_id(0) * (ROWS * TILES)
    first = first if FEW else gl.minimum(first, rows - ROWS * TILES)
    if STORAGE == "bfloat16":
        scale = scale.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    begun = gl.program_id(1) * (SUMS * COLUMNS // PARTS)
    k = axis_range(WARPS_K, 0, 3, TILE) * SPAN
    k_read = axis_range(WARPS_K, 0, 3, READ) * SPAN
    words, one, other = weight_pointers(codes, metadata, first, k_read, rows, LENGTH, FEW, WIDE, READ)
    pairs = ()
    for column in gl.static_range(SUMS):
        if ARRANGED:
            p = _arranged(x, gl.program_id(1) * SUMS + column, k, STEPS * CHUNKS * WARPS_K, TILE)
        else:
            p = _pairs(x, begun, column, k, count, LENGTH, PARTS, ALL // 4, TILE)
        pairs = pairs + (p,)  # noqa: RUF005, Gluon has no unpacking
    place = _place(WARPS_K, TILE)
    total = ()
    for _ in gl.static_range(TILES * SUMS):
        total = total + (gl.zeros(SHAPE, gl.float32, TILE),)  # noqa: RUF005
    wait_for_previous(USE_PDL)
    following = ()
    if AHEAD:
        following = read_weight(
            words, one, other, scale, first, rows, k_read, 0, LENGTH, BLOCK, PARTS, WARPS_K, CHUNKS, TILES, WHOLE, WHOLE, FEW,
            WIDE, TILE,
        )  # fmt: skip
    for step in range(0, STEPS):
        stored = following
        if AHEAD:
            following = read_weight(
                words, one, other, scale, first, rows, k_read, step + 1, LENGTH, BLOCK, PARTS, WARPS_K, CHUNKS, TILES, WHOLE,
                False, FEW, WIDE, TILE,
            )  # fmt: skip
        else:
            stored = read_weight(
                words, one, other, scale, first, rows, k_read, step, LENGTH, BLOCK, PARTS, WARPS_K, CHUNKS, TILES, WHOLE, WHOLE,
                FEW, WIDE, TILE,
            )  # fmt: skip
        _keep_order()
        for chunk in gl.static_range(CHUNKS):
            # Columns of the first turn of a wide read, and of this one from there.
            begin, more = (chunk // 2 * 2 * TURN, chunk % 2 * PART) if WIDE else (chunk * TURN, 0)
            beyond = LENGTH - begin - step * STEP - k
            inputs = ()
            for column in gl.static_range(SUMS):
                for register in gl.static_range(4):
                    if ARRANGED:
                        p = pairs[column] + (step * (STEP * 4) + (WORDS_OF_TURN * chunk + 128 * register))
                        v = gl.load(p)
                    else:
                        p = pairs[column] + (step * (STEP // 2) + (begin + more) // 2)
                        v = _inputs(p, column, register, beyond, PARTS, ALL // 4, WHOLE, TILE)
                    inputs = inputs + (v,)  # noqa: RUF005
            result = ()
            for tile in gl.static_range(TILES):
                a0, a1, a2, a3, e = gl.inline_asm_elementwise(
                    DECODE[IS_BF16], DECODED,
                    [
                        stored[4 * (TILES * chunk + tile)], stored[4 * (TILES * chunk + tile) + 1],
                        stored[4 * (TILES * chunk + tile) + 2], place,
                    ],
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
                    s = stored[4 * (TILES * chunk + tile) + 3]
                    result = result + (gl.fma(added, s, total[tile * SUMS + column]),)  # noqa: RUF005
            total = result
    for tile in gl.static_range(TILES):
        for column in gl.static_range(SUMS):
            _store(
                total[tile * SUMS + column], bias, y, first + ROWS * tile, begun + column * (COLUMNS // PARTS), count, rows,
                PARTS, DTYPE,
            )  # fmt: skip


@gluon.jit
def _keep_order():
    """What is read before this in the program is read before it: the assembler moves reads down to where their values are
    needed, and a warp waited for each of them then."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _place(WARPS_K: gl.constexpr, TILE: gl.constexpr):
    """What `assembly` has to know of a lane: selector, shift and factor by its place among four."""
    lane, which = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE) + axis_range(WARPS_K, 0, 3, TILE) * 0
    selector = gl.where(lane % 4 < 2, BYTES[0], BYTES[1])
    down, up = gl.where(lane % 2 == 0, DOWN[0], DOWN[1]), gl.where(lane % 2 == 0, UP[0], UP[1])
    return gl.where(which == 0, selector, gl.where(which == 1, down, up))


@gluon.jit
def _pairs(
    x, begun, COLUMN: gl.constexpr, k, count, LENGTH: gl.constexpr, PARTS: gl.constexpr, LANE: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Pointers to the pairs of inputs of column 8 COLUMN + g that a lane has in b0 of the four instructions. LANE: columns
    of a lane that reads the weight."""
    lane, at = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
    row = gl.minimum(begun + (COLUMNS * COLUMN + lane // 4) // PARTS, count - 1)
    return as_words(x) + (row * (LENGTH // 2) + (k // 2 + (LANE // 2 * (lane % 4 // 2) + lane % 2 + 4 * at)))


@gluon.jit
def _arranged(x, column, k, TURNS: gl.constexpr, TILE: gl.constexpr):
    """Pointers to what a lane has in b0 of the four instructions of a turn, of a column tile of arranged inputs."""
    lane, at = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
    return as_words(x) + ((column * TURNS + k // TURN) * WORDS_OF_TURN + (4 * lane + at))


@gluon.jit
def _inputs(
    pairs, COLUMN: gl.constexpr, REGISTER: gl.constexpr, beyond, PARTS: gl.constexpr, LANE: gl.constexpr,
    WHOLE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Register REGISTER of B, of the four instructions of a turn: the codes that it meets are those of lane t' // 2, or two
    lanes further, of the first or the second half of their groups."""
    pairs += LANE * (REGISTER % 2) + 2 * (REGISTER // 2)
    if PARTS == 1 and WHOLE:
        return gl.load(pairs)
    else:
        lane, at = axis_range(32, 1, 3, TILE), axis_range(4, 2, 3, TILE)
        reader = lane % 4 // 2 + REGISTER % 2 * 2
        own = reader // (4 // PARTS) == (COLUMNS * COLUMN + lane // 4) % PARTS
        return gl.load(pairs, mask=own & (LANE * reader + at * 0 < beyond), other=0)


@gluon.jit
def _store(total, bias, y, first, begun, count, rows, PARTS: gl.constexpr, DTYPE: gl.constexpr):
    """16 rows of the weight by 8 / PARTS rows of X, of sums (warps, 32 lanes, rows g and g + 8 by columns 2 t and 2 t + 1)."""
    result = gl.sum(total, axis=0)
    if PARTS > 1:
        result = gl.sum(gl.reshape(result, [8, 4, 2, 2]), axis=3)
    if PARTS > 2:
        result = gl.sum(gl.reshape(result, [8, 2, 2, 2]), axis=2)
    APART: gl.constexpr = 8 // PARTS
    result = gl.reshape(result, [ROWS * APART])
    i = gl.arange(0, ROWS * APART, layout=result.type.layout)
    if PARTS == 1:
        n, m = i // 16 + i // 2 % 2 * 8, i // 4 % 4 * 2 + i % 2
    else:
        n, m = i // (2 * APART) + i % 2 * 8, i // 2 % APART
    n, m = first + n, begun + m
    inside = (n < rows) & (m < count)
    if bias is not None:
        result += gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
    gl.store(y + (m.to(gl.int64) * rows + n), narrowed(result, DTYPE), mask=inside)
