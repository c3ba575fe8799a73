"""y = W x + bias for a weight W (N, K) of packed 4-bit integers and one vector x of 16-bit floats, in Gluon.

At batch 1 the GEMV is bound by reading the weight: at the copy rate there are about 7 issue slots for a 4-bit code, of which
`gemv_any` takes 5. Here one shift and one logical operation decode two codes to a pair of 16-bit floats in a register, and the
tensor core (`mma.m16n8k16`) multiplies and adds: 2 instructions a code in all.

Fragments of the instruction, by lane 4 g + t (g from 0 to 7, t from 0 to 3):

    A, 16 x 16: the weight                B, 16 x 8: the inputs             C, 16 x 8: the sums
    row g       a0  a2                    column g    b0  b1                row g       c0  c1
    row g + 8   a1  a3                                                      row g + 8   c2  c3
    a0, b0: k = 2 t, 2 t + 1              a2, b1: k = 2 t + 8, 2 t + 9      c0, c2: column 2 t; c1, c3: column 2 t + 1

Rows are rows of the weight. Of a step of 128 along K, lane (g, t) reads the t-th quarter of rows g and g + 8, 16 bytes each:

    k in a step   0 ........ 31 | 32 ....... 63 | 64 ....... 95 | 96 ...... 127
    lane t              0       |       1       |       2       |       3
    its 16 bytes  four words w of eight codes; codes j and j + 4 of a word are a pair (j from 0 to 3)
    mma 2 w       a0, a1: pair 0 of word w of rows g, g + 8; a2, a3: pair 1;  b0, b1: the inputs, paired likewise
    mma 2 w + 1   the same for pairs 2 and 3

The order of K is free where both operands have the same one, so codes go from memory to the tensor core in the lane that read
them.

The 8 columns are 8 neighbouring parts of K (32 elements each, 256 in all: STEPS steps), each within one block. Column n holds
the inputs of part n, and zeros in place of the other parts of its step:

    column           0   1   2   3   4   5   6   7
    step 0, lane t   0   1   2   3   .   .   .   .     the lane whose quarter is the column's part; the others hold zeros
    step 1, lane t   .   .   .   .   0   1   2   3

A lane so needs the inputs of one step in STEPS and hands them to the tensor core in all of them; what other steps leave in its
column is ignored. Each lane ends up with two rows times two parts, every one with a scale of its own, so that nothing is scaled
twice and no data moves between lanes.

A code sits in the highest bits of the fraction of 16.0, so a decoded element is 16 more than the code, and 24 more where codes
are two's complement (their highest bit is flipped) or 8 stands for 0. This offset and the zero point are taken off as a factor
of the sum of a part's inputs, which the tensor core computes once for all rows; before the block's scale, in float32, so that
nothing grows beyond a block:

    y[n] = sum over parts of s (-(24 + z) sum of x  +  sum of (c + 24) x)  [+ z sum of x, where zero points are values]

Layouts are explicit, since the assembly depends on them.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.triton_gemv.gluon import (
    as_scale,
    as_words,
    axis_range,
    gated_sums,
    narrowed,
    select_pointers,
    wait_for_previous,
)


def _decoded(word: str, out: str, kind: str, signed: bool) -> str:
    """Assembly: the eight codes of a word as four pairs of 16-bit floats, 16 more than the codes, 24 for two's complement."""
    place, one = (3, 0x4180) if kind == "bf16" else (6, 0x4C00)
    magic, mask = one + (8 << place if signed else 0), 15 << place
    text = ""
    for j in range(4):
        by = 4 * j - place
        text += f"shr.u32 v, {word}, {by}; " if by > 0 else f"shl.b32 v, {word}, {-by}; "
        text += f"lop3.b32 {out}{j}, v, 0x{mask:04X}{mask:04X}, 0x{magic:04X}{magic:04X}, 0x6A; "
    return text


def _multiplied(kind: str, a: list[str], b: list[str]) -> str:
    """Assembly: add the product of a step's four registers of A and two of B to c0 to c3."""
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{c0, c1, c2, c3}}, {{{', '.join(a)}}}, "
        f"{{{', '.join(b)}}}, {{c0, c1, c2, c3}}; "
    )


def _begun(values: list[str]) -> str:
    """Assembly: registers for the sums of two rows and two columns, which begin at these values."""
    return ".reg .f32 c<4>; " + "".join(f"mov.f32 c{i}, {value}; " for i, value in enumerate(values))


ENDED = "".join(f"mov.f32 ${i}, c{i}; " for i in range(4)) + "}"


def _products_asm(kind: str, signed: bool) -> str:
    """Assembly of a step: add rows g and g + 8 times columns 2 t and 2 t + 1.

    Operands, four registers each: sums out; sums in; words of row g; of row g + 8; the four pairs of the inputs of each word.
    """
    text = "{ .reg .b32 v, l<4>, h<4>; " + _begun([f"${4 + i}" for i in range(4)])
    for word in range(4):
        text += _decoded(f"${8 + word}", "l", kind, signed) + _decoded(f"${12 + word}", "h", kind, signed)
        for j in (0, 2):
            a = [f"l{j}", f"h{j}", f"l{j + 1}", f"h{j + 1}"]
            text += _multiplied(kind, a, [f"${16 + 4 * pair + word}" for pair in (j, j + 1)])
    return text + ENDED


def _input_sums_asm(kind: str) -> str:
    """Assembly: the sums of the inputs of columns 2 t and 2 t + 1, twice. Operands: sums out; the four pairs of each word."""
    text = (
        "{ .reg .b32 l; "
        + _begun(["0f00000000"] * 4)
        + f"mov.b32 l, {'0x3F803F80' if kind == 'bf16' else '0x3C003C00'}; "
    )
    for word in range(4):
        for j in (0, 2):
            text += _multiplied(kind, ["l"] * 4, [f"${4 + 4 * pair + word}" for pair in (j, j + 1)])
    return text + ENDED


#: Elements of a part, of a step and of a unit along K; parts of a step, steps of a unit, whose parts are the eight columns.
PART, STEP, UNIT = gl.constexpr(32), gl.constexpr(128), gl.constexpr(8 * 32)
PARTS, STEPS = gl.constexpr(STEP.value // PART.value), gl.constexpr(UNIT.value // STEP.value)
#: Assembly by 2 * (bfloat16) + (two's complement), and by (bfloat16).
PRODUCTS = gl.constexpr([_products_asm(kind, signed) for kind in ("f16", "bf16") for signed in (False, True)])
SUMS = gl.constexpr([_input_sums_asm(kind) for kind in ("f16", "bf16")])
OPERANDS = gl.constexpr(",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * 24))
SUM_OPERANDS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16))


@gluon.jit
def _paired(x, TILE: gl.constexpr):
    """Eight inputs of each word (..., 4 pairs of neighbours) as the four pairs of its codes."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0, x1, x2, x3 = (
        gl.convert_layout(x0, TILE, True), gl.convert_layout(x1, TILE, True),
        gl.convert_layout(x2, TILE, True), gl.convert_layout(x3, TILE, True),
    )  # fmt: skip
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632; prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;",
        "=&r,=&r,=&r,=&r,r,r,r,r", [x0, x1, x2, x3], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _per_row(pointers, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """One value for two columns (WARPS_K, 32, 2 rows, 1 or 2) as one for each of a lane's sums."""
    v = gl.load(pointers)
    LAYOUT: gl.constexpr = v.type.layout
    v = gl.broadcast(v, gl.zeros([SHAPE[0], 32, 2, 2], gl.int32, LAYOUT))[0]
    return gl.convert_layout(gl.reshape(v, SHAPE), TILE, assert_trivial=True)


@gluon.jit
def triton_gemv_w4a16_kernel(
    x, codes, scale, zero, bias, y, rows,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WARPS_K: gl.constexpr, STORAGE: gl.constexpr, SIGNED: gl.constexpr,
    SHIFTED: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """16 elements of y; see `_dot_products`."""
    _store_rows(
        gl.program_id(0), x, codes, scale, zero, bias, y, rows, LENGTH, BLOCK, WARPS_K, STORAGE, SIGNED, SHIFTED, DTYPE, USE_PDL
    )  # fmt: skip


@gluon.jit
def triton_gemv_w4a16_pair_kernel(
    x, codes, scale, zero, y, codes2, scale2, zero2, y2, rows,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WARPS_K: gl.constexpr, STORAGE: gl.constexpr, SIGNED: gl.constexpr,
    SHIFTED: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The same for two weights of `rows` rows, one after the other."""
    program, tiles = gl.program_id(0), (rows + 15) // 16
    if program < tiles:
        _store_rows(
            program, x, codes, scale, zero, None, y, rows, LENGTH, BLOCK, WARPS_K, STORAGE, SIGNED, SHIFTED, DTYPE, USE_PDL
        )  # fmt: skip
    else:
        _store_rows(
            program - tiles, x, codes2, scale2, zero2, None, y2, rows, LENGTH, BLOCK, WARPS_K, STORAGE, SIGNED, SHIFTED,
            DTYPE, USE_PDL,
        )  # fmt: skip


@gluon.jit
def triton_gemv_w4a16_swiglu_kernel(
    x, codes, scale, zero, codes2, scale2, zero2, y, rows,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WARPS_K: gl.constexpr, STORAGE: gl.constexpr, SIGNED: gl.constexpr,
    SHIFTED: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """8 elements of silu(gate) * up, of two weights of `rows` rows: those of one are rows g of the instruction, of the other
    rows g + 8."""
    first = gl.minimum(gl.program_id(0) * 8, rows - 8)
    result = _dot_products(
        first, x, codes, scale, zero, codes2, scale2, zero2, LENGTH, BLOCK, WARPS_K, STORAGE, SIGNED, SHIFTED, DTYPE, USE_PDL
    )  # fmt: skip
    gate, up = gl.split(result)
    gl.store(y + first + gl.arange(0, 8, layout=gate.type.layout), gated_sums(gate, up, DTYPE))


@gluon.jit
def _store_rows(
    program, x, codes, scale, zero, bias, y, rows,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WARPS_K: gl.constexpr, STORAGE: gl.constexpr, SIGNED: gl.constexpr,
    SHIFTED: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """16 elements of y, those of a program. rows: N, at least 16."""
    # The last program takes rows again where they are no multiple of 16.
    first = gl.minimum(program * 16, rows - 16)
    result = _dot_products(
        first, x, codes, scale, zero, None, None, None, LENGTH, BLOCK, WARPS_K, STORAGE, SIGNED, SHIFTED, DTYPE, USE_PDL
    )  # fmt: skip
    result = gl.reshape(result, [16])
    i = gl.arange(0, 16, layout=result.type.layout)
    n = first + i // 2 + i % 2 * 8
    if bias is not None:
        result += gl.load(bias + n).to(gl.float32)
    gl.store(y + n, narrowed(result, DTYPE))


@gluon.jit
def _dot_products(
    first, x, codes, scale, zero, codes2, scale2, zero2,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WARPS_K: gl.constexpr, STORAGE: gl.constexpr, SIGNED: gl.constexpr,
    SHIFTED: gl.constexpr, DTYPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """16 products in float32, (8, 2): row `first` + g and the one 8 further, or the same row of a second weight. LENGTH: K,
    a multiple of 256 * WARPS_K; BLOCK: elements of a block along K, a multiple of 32 that divides K; WARPS_K: warps along K;
    STORAGE: of scales; SIGNED: codes are two's complement; SHIFTED: zero points are values, bfloat16, not codes; USE_PDL:
    launched before the kernel in front of it has ended."""
    SHAPE: gl.constexpr = [WARPS_K, 32, 4]
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS_K, 1, 1], [2, 1, 0])
    INPUT: gl.constexpr = gl.BlockedLayout([1, 1, 4, 4], [1, 32, 1, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    SCALE: gl.constexpr = gl.BlockedLayout([1, 1, 2, 2], [1, 32, 1, 1], [WARPS_K, 1, 1, 1], [3, 2, 1, 0])
    IS_BF16: gl.constexpr = DTYPE == "bfloat16"
    # Offset of decoded elements; elements that the warps along K take at once; blocks in a row.
    OFFSET: gl.constexpr = 24.0 if SIGNED or SHIFTED else 16.0
    TURN: gl.constexpr = UNIT * WARPS_K
    BLOCKS: gl.constexpr = LENGTH // BLOCK
    # Columns of a lane that have a scale each.
    APART: gl.constexpr = 1 if BLOCK % (2 * PART) == 0 else 2
    lane = axis_range(32, 1, 3, TILE)
    k = axis_range(WARPS_K, 0, 3, TILE) * UNIT + 32 * (lane % 4)
    begun = first.to(gl.int64) * (LENGTH // 8)
    word = k // 8 + axis_range(4, 2, 3, TILE) + lane // 4 * (LENGTH // 8)
    words = as_words(codes) + (begun + word)
    # Those of rows g + 8: as many bytes further, or the other weight's.
    others = words + LENGTH if codes2 is None else as_words(codes2) + (begun + word)
    # Inputs of the step that a lane's column is in, where they are of its part.
    lane_in = axis_range(32, 1, 4, INPUT)
    k_in = axis_range(WARPS_K, 0, 4, INPUT) * UNIT + lane_in // 4 // PARTS * STEP + 32 * (lane_in % 4)
    own = lane_in % 4 * 32 // PART == lane_in // 4 % PARTS
    inputs = as_words(x) + (k_in // 2 + 4 * axis_range(4, 2, 4, INPUT) + axis_range(4, 3, 4, INPUT))
    # Scales: rows g and g + 8, parts 2 t and 2 t + 1.
    lane_of = axis_range(32, 1, 4, SCALE)
    half = axis_range(2, 2, 4, SCALE)
    row = lane_of // 4 + (half * 8 if codes2 is None else half * 0)
    part = 2 * (lane_of % 4) + axis_range(APART, 3, 4, SCALE)
    begin = axis_range(WARPS_K, 0, 4, SCALE) * UNIT + PART * part
    # Blocks of these rows, which a program counts from its first.
    before = first.to(gl.int64) * BLOCKS
    mine = 2 * (lane % 4) // PARTS
    wait_for_previous(USE_PDL)
    total = gl.zeros(SHAPE, gl.float32, TILE)
    for at in range(0, LENGTH, TURN):
        w = ()
        for step in gl.static_range(STEPS):
            for apart in gl.static_range(2):
                p = (words if apart == 0 else others) + (at + STEP * step) // 8
                w = w + (gl.load(p, eviction_policy="evict_first"),)  # noqa: RUF005, Gluon has no unpacking
        b0, b1, b2, b3 = _paired(gl.load(inputs + at // 2, mask=own, other=0), TILE)
        block = row * BLOCKS + (at + begin) // BLOCK
        s = as_scale(_per_row(_of(scale, scale2, before, block, half), SHAPE, TILE), STORAGE)
        sums = gl.inline_asm_elementwise(
            SUMS[IS_BF16], SUM_OPERANDS, [b0, b1, b2, b3], dtype=gl.float32, is_pure=True, pack=4
        )
        less = gl.full(SHAPE, -OFFSET, gl.float32, TILE)
        if zero is not None:
            z = _per_row(_of(zero, zero2, before, block, half), SHAPE, TILE).to(gl.int32)
            if SHIFTED:
                total = gl.fma((z << 16).to(gl.float32, bitcast=True), sums, total)
            else:
                less -= z.to(gl.float32)
        # The offset comes first, so that nothing but the scale is left for the end.
        less *= sums
        added = less
        for step in gl.static_range(STEPS):
            result = gl.inline_asm_elementwise(
                PRODUCTS[2 * IS_BF16 + SIGNED], OPERANDS, [less, w[2 * step], w[2 * step + 1], b0, b1, b2, b3],
                dtype=gl.float32, is_pure=True, pack=4,
            )  # fmt: skip
            added = gl.where(mine == step, result, added)
        total = gl.fma(added, s, total)
    # (warps, g, t, rows g and g + 8, columns) to rows.
    return gl.sum(gl.sum(gl.sum(gl.reshape(total, [WARPS_K, 8, 4, 2, 2]), axis=4), axis=2), axis=0)


@gluon.jit
def _of(one, other, before, block, half):
    """Pointers to values of blocks, after those of earlier programs: of rows g + 8 in the other weight, if there is one."""
    return select_pointers(one + (before + block), None if other is None else other + (before + block), half)
