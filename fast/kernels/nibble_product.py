"""y = W x + bias for a stored weight W (N, K) of 4-bit integers and one vector x of 16-bit numbers, in Gluon.

At the copy rate there are about 7 issue slots for a 4-bit code, and the way of `vector_product` takes 5 of them. Here two
codes become a pair of 16-bit numbers by one shift and one logical operation, and the tensor core (`mma.m16n8k16`) multiplies
and adds.

Memory is read as it lies: a warp takes 32 * WORDS words of a row, a lane WORDS neighbouring ones, and the inputs of the same
places. The instruction's 16 rows are eight parts of K, twice: lane (g, t) holds the t-th quarter of part g of a row n, and of
the next row n + 1. Its eight columns are the inputs of the eight parts, so of the products only the diagonal means anything: a
part of W by its own inputs. It costs seven eighths of the tensor core's work, of which there is plenty, and no data moves
between lanes. The order of K is free where both operands have the same one: codes j and j + 4 of a word make a pair, and the
inputs are paired likewise.

WORDS is chosen so that a part lies in one block. A code sits in the highest bits of the fraction of 16, so that a pair of
numbers is 16 more than the codes, and 24 more where codes are two's complement (their highest bit is flipped) or 8 stands for
0. What a part has too much, this and its zero point, is a number times the sum of its inputs, which the tensor core makes once
for all rows; it is taken off before the block's scale, in float32, so that nothing grows beyond a block:

    y[n] = sum over parts of s (sum of (c + 24) x  -  (24 + z) sum of x)  [+ z sum of x, where zero points are values]

What comes from memory is asked for a step ahead. Layouts are explicit, since the assembly depends on them.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.lanes import after_others, as_scale, narrowed, numbered, spread


def _decoded(word: str, out: str, kind: str, signed: bool) -> str:
    """Assembly: the eight codes of a word as four pairs of 16-bit numbers, 16 more than the codes, 24 for two's complement."""
    place, one = (3, 0x4180) if kind == "bf16" else (6, 0x4C00)
    magic, mask = one + (8 << place if signed else 0), 15 << place
    text = ""
    for j in range(4):
        by = 4 * j - place
        text += f"shr.u32 v, {word}, {by}; " if by > 0 else f"shl.b32 v, {word}, {-by}; "
        text += f"lop3.b32 {out}{j}, v, 0x{mask:04X}{mask:04X}, 0x{magic:04X}{magic:04X}, 0x6A; "
    return text


def _products(words: int, kind: str, signed: bool) -> str:
    """Assembly for the words of two rows: sums of parts, what they have too much taken off, scaled and added.

    Operands, 2 * words registers each, those of the first row first: totals out; totals in; words; four pairs of inputs; sums
    of inputs; their factors; scales; and which of a lane's two columns may be on the diagonal. Totals and sums are in the
    first register of each row.
    """
    count = 2 * words
    totals, codes, inputs, sums, factors, scales, odd = (count * i for i in (1, 2, 3, 7, 8, 9, 10))
    text = "{ .reg .b32 v, l<4>, h<4>; .reg .f32 c<4>; .reg .pred p; "
    text += f"setp.ne.s32 p, ${odd}, 0; "
    text += "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(4))
    for word in range(words):
        text += _decoded(f"${codes + word}", "l", kind, signed)
        text += _decoded(f"${codes + words + word}", "h", kind, signed)
        b = [f"${inputs + count * pair + word}" for pair in range(4)]
        for j in (0, 2):
            text += (
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{c0, c1, c2, c3}}, "
                f"{{l{j}, h{j}, l{j + 1}, h{j + 1}}}, {{{b[j]}, {b[j + 1]}}}, {{c0, c1, c2, c3}}; "
            )
    text += "selp.f32 c0, c1, c0, p; selp.f32 c2, c3, c2, p; "
    for i in range(count):
        sum_of = {0: "c0", words: "c2"}.get(i)
        if sum_of is None:
            text += f"mov.f32 ${i}, ${totals + i}; "
            continue
        text += f"fma.rn.f32 {sum_of}, ${factors + i}, ${sums + i}, {sum_of}; "
        text += f"fma.rn.f32 ${i}, {sum_of}, ${scales + i}, ${totals + i}; "
    return text + "}"


def _sums(words: int, kind: str) -> str:
    """Assembly: the sum of a part's inputs, in the first register of each lane that is on the diagonal; the other factor is 1.

    Operands, `words` registers each: sums out; four pairs of inputs; which of a lane's two columns may be on the diagonal.
    """
    one = "0x3F803F80" if kind == "bf16" else "0x3C003C00"
    text = (
        "{ .reg .b32 l; .reg .f32 c<4>; .reg .pred p; "
        + f"setp.ne.s32 p, ${5 * words}, 0; mov.b32 l, {one}; "
    )
    text += "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(4))
    for word in range(words):
        b = [f"${words * (1 + pair) + word}" for pair in range(4)]
        for j in (0, 2):
            text += (
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{c0, c1, c2, c3}}, "
                f"{{l, l, l, l}}, {{{b[j]}, {b[j + 1]}}}, {{c0, c1, c2, c3}}; "
            )
    text += "selp.f32 $0, c1, c0, p; " + "".join(f"mov.f32 ${i}, 0f00000000; " for i in range(1, words))
    return text + "}"


def _operands(words: int) -> str:
    kinds = ["=&f", "f", "r", "r", "r", "r", "r", "f", "f", "f", "r"]
    return ",".join(kind for kind in kinds for _ in range(2 * words))


#: Assembly by 4 * WORDS + 2 * (bfloat16) + (two's complement), of sums of inputs without the last.
PRODUCTS = gl.constexpr(
    {
        4 * words + 2 * brain + signed: _products(words, "bf16" if brain else "f16", bool(signed))
        for words in (1, 2, 4)
        for brain in (0, 1)
        for signed in (0, 1)
    }
)
SUMS = gl.constexpr(
    {
        4 * words + 2 * brain: _sums(words, "bf16" if brain else "f16")
        for words in (1, 2, 4)
        for brain in (0, 1)
    }
)
OPERANDS = gl.constexpr({words: _operands(words) for words in (1, 2, 4)})
SUM_OPERANDS = gl.constexpr({words: ",".join(["=&f"] * words + ["r"] * (5 * words)) for words in (1, 2, 4)})


@gluon.jit
def _paired(x, TILE: gl.constexpr):
    """Eight inputs of each word (..., 4 pairs of neighbours) as the four pairs of its codes."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3], 2, 2]))
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
def nibble_kernel(
    x, codes, scale, zero, bias, y, rows,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr, ALONG: gl.constexpr,
    UNROLL: gl.constexpr, STORAGE: gl.constexpr, SIGNED: gl.constexpr, SHIFTED: gl.constexpr, DTYPE: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    """ROWS numbers of y. rows: N, at least ROWS; LENGTH: K; BLOCK: elements of a block along K; ALONG: warps along K; UNROLL:
    steps of a turn; STORAGE: of scales; SIGNED: codes are two's complement; SHIFTED: zero points are values, bfloat16, not
    codes; LATE: launched before the kernel in front of it has ended."""
    SHAPE: gl.constexpr = [ALONG, ROWS, 32, WORDS]
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 1, WORDS], [1, 1, 32, 1], [ALONG, 1, 1, 1], [3, 2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [1, 1, 32, 1], [ALONG, 1, 1, 1], [3, 2, 1, 0])
    INPUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, WORDS, 4], [1, 1, 32, 1, 1], [ALONG, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    BRAIN: gl.constexpr = DTYPE == "bfloat16"
    # What codes have too much; elements that the warps along K take at once; blocks in a row, and in a step.
    MORE: gl.constexpr = 24.0 if SIGNED or SHIFTED else 16.0
    STEP: gl.constexpr = 256 * WORDS * ALONG
    BLOCKS: gl.constexpr = LENGTH // BLOCK
    STEADY: gl.constexpr = STEP % BLOCK == 0
    # The last programs take rows again where rows are no multiple, so that a row is a constant distance.
    first = gl.minimum(gl.program_id(0) * ROWS, rows - ROWS)
    word = (numbered(ALONG, 0, 4, TILE) * 32 + numbered(32, 2, 4, TILE)) * WORDS + numbered(WORDS, 3, 4, TILE)
    words = codes.to(gl.pointer_type(gl.int32), bitcast=True) + first.to(gl.int64) * (LENGTH // 8)
    words = words + word + numbered(ROWS, 1, 4, TILE) * (LENGTH // 8)
    pair = (numbered(ALONG, 0, 5, INPUT) * 32 + numbered(32, 2, 5, INPUT)) * WORDS + numbered(
        WORDS, 3, 5, INPUT
    )
    inputs = x.to(gl.pointer_type(gl.int32), bitcast=True) + (4 * pair + numbered(4, 4, 5, INPUT))
    lane = numbered(32, 2, 4, LANES)
    odd = spread(lane // 4 % 2, SHAPE, LANES, TILE)
    odd_once = spread(lane // 4 % 2, [ALONG, 1, 32, WORDS], LANES, TILE)
    start = (numbered(ALONG, 0, 4, LANES) * 32 + lane) * (8 * WORDS)
    scales = scale + first.to(gl.int64) * BLOCKS + numbered(ROWS, 1, 4, LANES) * BLOCKS
    zeros = (
        scales if zero is None else zero + first.to(gl.int64) * BLOCKS + numbered(ROWS, 1, 4, LANES) * BLOCKS
    )
    HELD: gl.constexpr = gl.float32 if STORAGE == "float32" else gl.int32
    after_others(LATE)
    total = gl.zeros(SHAPE, gl.float32, TILE)
    shift = gl.zeros([ALONG, ROWS, 32, 1], gl.float32, LANES)
    w = gl.load(words, eviction_policy="evict_first")
    s = gl.load(scales + start // BLOCK).to(HELD)
    z = s if zero is None else gl.load(zeros + start // BLOCK).to(gl.int32)
    for turn in range(0, LENGTH, STEP * UNROLL):
        for part in gl.static_range(UNROLL):
            b0, b1, b2, b3 = _paired(gl.load(inputs + turn // 2 + part * STEP // 2), TILE)
            # The step ahead; blocks of which every step has a whole number lie at fixed distances.
            if part == UNROLL - 1:
                more = turn + (part + 1) * STEP < LENGTH
            else:
                more = True
            if STEADY:
                at = start // BLOCK + turn // BLOCK + (part + 1) * STEP // BLOCK
            else:
                at = (start + turn + (part + 1) * STEP) // BLOCK
            w_ahead = gl.load(
                words + turn // 8 + (part + 1) * STEP // 8, mask=more, other=0, eviction_policy="evict_first"
            )
            s_ahead = gl.load(scales + at, mask=more, other=0).to(HELD)
            z_ahead = s_ahead if zero is None else gl.load(zeros + at, mask=more, other=0).to(gl.int32)
            sums = gl.inline_asm_elementwise(
                SUMS[4 * WORDS + 2 * BRAIN], SUM_OPERANDS[WORDS], [b0, b1, b2, b3, odd_once],
                dtype=gl.float32, is_pure=True, pack=WORDS,
            )  # fmt: skip
            if zero is None or SHIFTED:
                less = gl.full([ALONG, ROWS, 32, 1], -MORE, gl.float32, LANES)
            else:
                less = -MORE - z.to(gl.float32)
            total = gl.inline_asm_elementwise(
                PRODUCTS[4 * WORDS + 2 * BRAIN + SIGNED], OPERANDS[WORDS],
                [
                    total, w, spread(b0, SHAPE, TILE, TILE), spread(b1, SHAPE, TILE, TILE), spread(b2, SHAPE, TILE, TILE),
                    spread(b3, SHAPE, TILE, TILE), spread(sums, SHAPE, TILE, TILE), spread(less, SHAPE, LANES, TILE),
                    spread(as_scale(s, STORAGE), SHAPE, LANES, TILE), odd,
                ],
                dtype=gl.float32, is_pure=True, pack=2 * WORDS,
            )  # fmt: skip
            if SHIFTED:
                once = gl.convert_layout(gl.expand_dims(gl.sum(sums, axis=3), 3), LANES, assert_trivial=True)
                shift = gl.fma(
                    (z << 16).to(gl.float32, bitcast=True),
                    spread(once, [ALONG, ROWS, 32, 1], LANES, LANES),
                    shift,
                )
            w, s, z = w_ahead, s_ahead, z_ahead
    made = gl.expand_dims(gl.sum(total, axis=3), 3)
    made = gl.convert_layout(made, LANES, assert_trivial=True)
    if SHIFTED:
        made += shift
    made = gl.where(lane % 4 == lane // 8, made, 0.0)
    made = gl.sum(gl.sum(gl.sum(made, axis=3), axis=2), axis=0)
    n = first + gl.arange(0, ROWS, layout=made.type.layout)
    if bias is not None:
        made += gl.load(bias + n).to(gl.float32)
    gl.store(y + n, narrowed(made, DTYPE))
