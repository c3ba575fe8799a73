"""y = W x + bias for a stored weight W (N, K) of 4-bit integers and one vector x of 16-bit numbers, in Gluon.

At the copy rate there are about 7 issue slots for a 4-bit code, and the way of `vector_product` takes 5 of them. Here two
codes become a pair of 16-bit numbers by one mask and one addition, and the tensor core (`mma.m16n8k16`) multiplies and adds.

Memory is read as it lies: a warp takes 32 * WORDS words of a row, a lane WORDS neighbouring ones, and the inputs of the same
places. The instruction's 16 rows are eight parts of K, twice: lane (g, t) holds the t-th quarter of part g of a row n, and of
the next row n + 1. Its eight columns are the inputs of the eight parts, so of the products only the diagonal means anything: a
part of W by its own inputs. It costs seven eighths of the tensor core's work, of which there is plenty, and no data moves
between lanes. The order of K is free where both operands have the same one: codes j and j + 4 of a word make a pair, and the
inputs are paired likewise.

WORDS is chosen so that a part lies in one block. Its sum, from zero, is multiplied by the block's scale and added, in float32.
Zero points are subtracted from the codes, exactly: those of -128 to 120. Layouts are explicit, since the assembly depends on
them.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.lanes import after_others, narrowed, numbered, row_of, spread, stored_scale


def _decoded(word: str, out: str, offset: str, kind: str, signed: bool) -> str:
    """Assembly: the eight codes of a word, plus what `offset` takes away, as four pairs of 16-bit numbers.

    A nibble in the lowest bits of the pattern of 128 (float16: 1024) adds itself; two's complement is offset by flipping bit 3.
    """
    half = f"{(0x4300 if kind == 'bf16' else 0x6400) + (8 if signed else 0):04X}"
    magic, add = f"0x{half}{half}", f"{kind}x2"
    text = ""
    for j in range(4):
        text += f"shr.u32 v, {word}, {4 * j}; " if j else f"mov.b32 v, {word}; "
        text += f"lop3.b32 {out}{j}, v, 0x000F000F, {magic}, 0x6A; "
    return text + "".join(f"add.rn.{add} {out}{j}, {out}{j}, {offset}; " for j in range(4))


def _products(words: int, kind: str, signed: bool) -> str:
    """Assembly for the words of two rows: sums of parts, scaled and added.

    Operands, 2 * words registers each, those of the first row first: totals out; totals in; words; four pairs of inputs;
    offsets; scales; and which of a lane's two columns may be on the diagonal. Totals are in the first register of each row.
    """
    count = 2 * words
    totals, codes, inputs, offsets, scales, odd = (count * i for i in (1, 2, 3, 7, 8, 9))
    text = "{ .reg .b32 v, l<4>, h<4>; .reg .f32 c<4>; .reg .pred p; "
    text += f"setp.ne.s32 p, ${odd}, 0; "
    text += "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(4))
    for word in range(words):
        text += _decoded(f"${codes + word}", "l", f"${offsets}", kind, signed)
        text += _decoded(f"${codes + words + word}", "h", f"${offsets + words}", kind, signed)
        b = [f"${inputs + count * pair + word}" for pair in range(4)]
        for j in (0, 2):
            text += (
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{c0, c1, c2, c3}}, "
                f"{{l{j}, h{j}, l{j + 1}, h{j + 1}}}, {{{b[j]}, {b[j + 1]}}}, {{c0, c1, c2, c3}}; "
            )
    text += "selp.f32 c0, c1, c0, p; selp.f32 c2, c3, c2, p; "
    for i in range(count):
        sum_of = {0: "c0", words: "c2"}.get(i)
        moved = f"mov.f32 ${i}, ${totals + i}; "
        text += moved if sum_of is None else f"fma.rn.f32 ${i}, {sum_of}, ${scales + i}, ${totals + i}; "
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
    kinds = ["=&f", "f", "r", "r", "r", "r", "r", "r", "f", "r"]
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
def _less_zero(zero, BRAIN: gl.constexpr):
    """-136 (float16: -1032) less a zero point, as a pair of 16-bit numbers; exact in bfloat16 up to a zero point of 120."""
    less = 8388608.0 - ((zero + (136 if BRAIN else 1032)) | 0x4B000000).to(gl.float32, bitcast=True)
    if BRAIN:
        bits = less.to(gl.int32, bitcast=True)
        return ((bits >> 16) & 0xFFFF) | (bits & -65536)
    else:
        return (less.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001


@gluon.jit
def nibble_kernel(
    x, codes, scale, zero, bias, y, rows, per_row,
    LENGTH: gl.constexpr, BLOCK: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr, ALONG: gl.constexpr,
    UNROLL: gl.constexpr, WIDE: gl.constexpr, STORAGE: gl.constexpr, SIGNED: gl.constexpr,
    SHIFTED: gl.constexpr, DTYPE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """ROWS numbers of y. rows: N; per_row: blocks in a row of W; LENGTH: K; BLOCK: elements of a block along K; ALONG: warps
    along K; UNROLL: steps a turn; STORAGE: of scales; SIGNED: codes are two's complement; SHIFTED: zero points are values,
    bfloat16, not codes; LATE: launched before the kernel in front of it has ended."""
    SHAPE: gl.constexpr = [ALONG, ROWS, 32, WORDS]
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 1, WORDS], [1, 1, 32, 1], [ALONG, 1, 1, 1], [3, 2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1], [1, 1, 32, 1], [ALONG, 1, 1, 1], [3, 2, 1, 0])
    INPUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, WORDS, 4], [1, 1, 32, 1, 1], [ALONG, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    BRAIN: gl.constexpr = DTYPE == "bfloat16"
    # Elements that the warps along K take at once.
    STEP: gl.constexpr = 256 * WORDS * ALONG
    first = gl.program_id(0) * ROWS
    row = row_of(first + numbered(ROWS, 1, 4, TILE), rows, WIDE)
    word = (numbered(ALONG, 0, 4, TILE) * 32 + numbered(32, 2, 4, TILE)) * WORDS + numbered(WORDS, 3, 4, TILE)
    words = codes.to(gl.pointer_type(gl.int32), bitcast=True) + (row * (LENGTH // 8) + word)
    pair = (numbered(ALONG, 0, 5, INPUT) * 32 + numbered(32, 2, 5, INPUT)) * WORDS + numbered(
        WORDS, 3, 5, INPUT
    )
    inputs = x.to(gl.pointer_type(gl.int32), bitcast=True) + (4 * pair + numbered(4, 4, 5, INPUT))
    lane = numbered(32, 2, 4, LANES)
    odd = spread(lane // 4 % 2, SHAPE, LANES, TILE)
    odd_once = spread(lane // 4 % 2, [ALONG, 1, 32, WORDS], LANES, TILE)
    start = (numbered(ALONG, 0, 4, LANES) * 32 + lane) * (8 * WORDS)
    blocks = row_of(first + numbered(ROWS, 1, 4, LANES), rows, WIDE) * per_row
    STEADY: gl.constexpr = STEP % BLOCK == 0
    after_others(LATE)
    total = gl.zeros(SHAPE, gl.float32, TILE)
    shift = gl.zeros([ALONG, ROWS, 32, 1], gl.float32, LANES)
    for turn in range(0, LENGTH, STEP * UNROLL):
        for part in gl.static_range(UNROLL):
            w = gl.load(words + turn // 8 + part * STEP // 8, eviction_policy="evict_first")
            b0, b1, b2, b3 = _paired(gl.load(inputs + turn // 2 + part * STEP // 2), TILE)
            # Blocks of which every step has a whole number lie at fixed distances.
            if STEADY:
                at = blocks + start // BLOCK + turn // BLOCK + part * STEP // BLOCK
            else:
                at = blocks + (start + turn + part * STEP) // BLOCK
            s = stored_scale(scale, at, STORAGE)
            # The patterns of -128 (float16: -1024), less 8 where codes are two's complement or 8 stands for 0.
            offset = at.to(gl.int32) * 0 + ((0xC300C300 if BRAIN else 0xE400E400) - (1 << 32))
            if SIGNED or SHIFTED:
                offset += 0x80008
            if SHIFTED:
                z = (gl.load(zero + at).to(gl.int32) << 16).to(gl.float32, bitcast=True)
                sums = gl.inline_asm_elementwise(
                    SUMS[4 * WORDS + 2 * BRAIN], SUM_OPERANDS[WORDS], [b0, b1, b2, b3, odd_once],
                    dtype=gl.float32, is_pure=True, pack=WORDS,
                )  # fmt: skip
                sums = gl.expand_dims(gl.sum(sums, axis=3), 3)
                shift += z * gl.convert_layout(sums, LANES, assert_trivial=True)
            elif zero is not None:
                offset = _less_zero(gl.load(zero + at).to(gl.int32), BRAIN)
            total = gl.inline_asm_elementwise(
                PRODUCTS[4 * WORDS + 2 * BRAIN + SIGNED], OPERANDS[WORDS],
                [
                    total, w, spread(b0, SHAPE, TILE, TILE), spread(b1, SHAPE, TILE, TILE), spread(b2, SHAPE, TILE, TILE),
                    spread(b3, SHAPE, TILE, TILE), spread(offset, SHAPE, LANES, TILE), spread(s, SHAPE, LANES, TILE), odd,
                ],
                dtype=gl.float32, is_pure=True, pack=2 * WORDS,
            )  # fmt: skip
    made = gl.expand_dims(gl.sum(total, axis=3), 3)
    made = gl.convert_layout(made, LANES, assert_trivial=True)
    if SHIFTED:
        made += shift
    made = gl.where(lane % 4 == lane // 8, made, 0.0)
    made = gl.sum(gl.sum(gl.sum(made, axis=3), axis=2), axis=0)
    n = first + gl.arange(0, ROWS, layout=made.type.layout)
    if bias is not None:
        made += gl.load(bias + n, mask=n < rows, other=0.0).to(gl.float32)
    gl.store(y + n, narrowed(made, DTYPE), mask=n < rows)
