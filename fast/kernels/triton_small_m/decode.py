"""Words of the private layout as 16-bit floats, pairs in a register: one shift, one or two logical operations, one sum.

    element   bfloat16                                                float16
    int4      (code ^ 8) in the fraction of 128, less 136             in the fraction of 1024, less 1032
    int8      7 bits in the fraction of 128, less 128, or 256 where   (code ^ 128) in the fraction of 1024, less 1152
              the sign is set: it is the last bit of the exponent
    e4m3      sign and the other bits 4 to the right, times 2**120    7 bits 1 to the right, times 2**8
    e2m1      sign, and 3 bits from bit 6 on, times 2**126            from bit 9 on, times 2**14
    nf4       two terms of a level, of tables of bytes by `prmt`      the same of other tables

All are exact, subnormal numbers of e4m3 and e2m1 too. NaN of e4m3 becomes 480: `layout.arrange` makes the scales of such rows
NaN. A zero point is one more number that is taken off: int4 has it in the one that is there anyway. |c - z| is at most 255,
exact too. Floats may have a scale in the power of two that they are multiplied by anyway (`fast.scale_factors`).

Words of the private layout as a tile of the weight, rows and columns in order, in the lanes that have them.

An atom is 64 rows by 64 columns, `WORDS` words. By the bits of rows n and columns k (n3 is bit 3 of n), from the slowest index:

    4 bits  n5 n4 | n2 n1 n0 | k2 k1 | k5 | k4            nibbles of a word: k0 k3 n3, of nf4 k3 n3 k0
    8 bits  k5 | n5 n4 | n2 n1 n0 | k2 k1 | k4 | k3       bytes of a word:   k0 n3

A warp (n5 n4) has 16 rows, its lane (n2 n1 n0, k2 k1) rows n and n + 8 and columns k, k + 1, k + 8, k + 9 of each 16: the
fragment of `wgmma`'s first operand, so what was read becomes the operand where it is. Words 2 i and 2 i + 1 are decoded
together (`decode`), which makes one more index of pairs (4 bits: k0 in place of k4; 8 bits: k0 in place of k3). The assembly
takes two registers of a lane, which have to be these words: a matter of the compiler's layout, which a test looks at.
"""

import triton
import triton.language as tl

from fast.scale_factors import TERMS


@triton.constexpr_function
def has_nibbles(element):
    """Whether elements have 4 bits."""
    return element in ("int4", "e2m1", "nf4")


@triton.constexpr_function
def words_of(element):
    """Words of an atom."""
    return 512 if element in ("int4", "e2m1", "nf4") else 1024


@triton.constexpr_function
def has_factors(element):
    """Whether scales are factors of elements (`fast.scale_factors`)."""
    return element in ("e2m1", "e4m3_mx")


@triton.constexpr_function
def words_before(columns, group):
    """Rows of words of a weight's factors, its own scale among them."""
    return 1 + columns // (16 if group == 16 else 64)


@triton.constexpr_function
def takes_factors(element, group, dtype):
    """Whether elements are multiplied by their scales before they are summed: float16 has no place for powers of two."""
    return element in ("e2m1", "e4m3_mx") and (dtype == "bfloat16" or group == 16)


@triton.constexpr_function
def atoms_of_product(element, group, dtype, block_k):
    """Atoms along K of a product, 1 or 2: all its columns have one scale, or factors."""
    factors = element in ("e2m1", "e4m3_mx") and (dtype == "bfloat16" or group == 16)
    return 2 if block_k >= 128 and (factors or group == 0 or group >= 128) else 1


@triton.jit
def tile_elements(w, less, NB: tl.constexpr, KB: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """(64 NB, 64 KB) floats of w (NB, words of KB atoms). less: None, or as words of the shape of w, see `decode`."""
    if has_nibbles(ELEMENT):
        p0, p1, p2, p3, p4, p5, p6, p7 = nibble_pairs(w, less, ELEMENT, DTYPE)
        return _in_order(p0, p1, p2, p3, p4, p5, p6, p7, NB, KB)
    else:
        p0, p1, p2, p3 = byte_pairs(w, less, ELEMENT, DTYPE)
        # Bytes by n3; words by k3: new indices k3 n3.
        t = tl.join(tl.join(p0, p2), tl.join(p1, p3))
        t = tl.reshape(t, (NB, KB, 2, 4, 8, 4, 2, 2, 2, 2))
        t = tl.permute(t, (0, 3, 9, 4, 1, 2, 6, 8, 5, 7))
        return tl.reshape(t, (64 * NB, 64 * KB))


@triton.jit
def _in_order(p0, p1, p2, p3, p4, p5, p6, p7, NB: tl.constexpr, KB: tl.constexpr):
    """(64 NB, 64 KB) of pairs of two words of nibbles."""
    # Nibbles by n3, k3; words by k4: new indices k4 k3 n3.
    even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
    odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))
    t = tl.reshape(tl.join(even, odd), (NB, KB, 4, 8, 4, 2, 2, 2, 2, 2))
    t = tl.permute(t, (0, 2, 9, 3, 1, 5, 7, 8, 4, 6))
    return tl.reshape(t, (64 * NB, 64 * KB))


@triton.jit
def tile_levels(w, NB: tl.constexpr, KB: tl.constexpr, DTYPE: tl.constexpr):
    """(64 NB, 64 KB) first and second terms of the levels of w, see `fast.scale_factors`."""
    p0, p1, p2, p3, p4, p5, p6, p7, q0, q1, q2, q3, q4, q5, q6, q7 = level_pairs(w, DTYPE)
    first = _in_order(p0, p1, p2, p3, p4, p5, p6, p7, NB, KB)
    return first, _in_order(q0, q1, q2, q3, q4, q5, q6, q7, NB, KB)


@triton.jit
def tile_codes(w, NB: tl.constexpr, KB: tl.constexpr):
    """(64 NB, 64 KB) codes of w, of nf4, int32."""
    p0, p1, p2, p3, p4, p5, p6, p7 = index_pairs(w)
    return _in_order(p0, p1, p2, p3, p4, p5, p6, p7, NB, KB).to(tl.float32).to(tl.int32)


@triton.jit
def word_halves(w, NB: tl.constexpr, ELEMENT: tl.constexpr):
    """Of one atom along K (NB, words) the words of its first and of its second 32 columns, each (NB, half of the words)."""
    if has_nibbles(ELEMENT):
        # Words by k5, k4.
        both = tl.permute(tl.reshape(w, (NB, 128, 2, 2)), (0, 1, 3, 2))
    else:
        both = tl.permute(tl.reshape(w, (NB, 2, 256, 2)), (0, 2, 3, 1))
    first, second = tl.split(both)
    WORDS: tl.constexpr = words_of(ELEMENT) // 2
    return tl.reshape(first, (NB, WORDS)), tl.reshape(second, (NB, WORDS))


@triton.jit
def half_elements(w, less, NB: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """(64 NB, 32) floats of one of `word_halves`; less: as words of its shape. Halves part before they are decoded: of whole
    atoms the compiler would decode words 2 i and 2 i + 2 together, as those lie side by side in what is parted afterwards."""
    if has_nibbles(ELEMENT):
        p0, p1, p2, p3, p4, p5, p6, p7 = nibble_pairs(w, less, ELEMENT, DTYPE)
        even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
        odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))
        t = tl.reshape(tl.join(even, odd), (NB, 4, 8, 4, 2, 2, 2, 2))
        t = tl.permute(t, (0, 1, 7, 2, 5, 6, 3, 4))
    else:
        p0, p1, p2, p3 = byte_pairs(w, less, ELEMENT, DTYPE)
        t = tl.join(tl.join(p0, p2), tl.join(p1, p3))
        t = tl.reshape(t, (NB, 4, 8, 4, 2, 2, 2, 2))
        t = tl.permute(t, (0, 1, 7, 2, 4, 6, 3, 5))
    return tl.reshape(t, (64 * NB, 32))


@triton.jit
def spread(pairs, NB: tl.constexpr, TIMES: tl.constexpr, EACH: tl.constexpr):
    """Words of pairs of rows (32 NB) in the shape of the atoms' words, which have all pairs TIMES times, and EACH of a pair."""
    z = tl.broadcast_to(tl.reshape(pairs, (NB, 1, 32, 1)), (NB, TIMES, 32, EACH))
    return tl.reshape(z, (NB, TIMES * 32 * EACH))


@triton.jit
def spread_factors(
    factors, atom, ROWS: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr, GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Factors of KB atoms along K from `atom` on, of the rows of a program, in the shape of the atoms' words.

    factors: of rows n and n + 8, (atoms, ROWS / 2, 4) pairs of 16 bits, or of blocks of 32 columns (atoms, ROWS / 2) words of
    the exponents of four.
    """
    EACH: tl.constexpr = 4 if GROUP == 16 else 1
    first = (atom + tl.arange(0, KB))[:, None] * (ROWS // 2 * EACH)
    inside = tl.program_id(0) * (32 * NB * EACH) + tl.arange(0, 32 * NB * EACH)
    f = tl.load(factors + (first + inside[None, :]))
    if GROUP == 16:
        f = factor_pairs(f, DTYPE)
    else:
        f = tl.join((f & 0x00FF00FF) << 7, ((f >> 8) & 0x00FF00FF) << 7)
    if has_nibbles(ELEMENT):
        # Words by k21, k5, k4.
        f = tl.reshape(f, (KB, NB, 32, 1, 2, 2 if GROUP == 16 else 1))
        f = tl.broadcast_to(tl.permute(f, (1, 0, 2, 3, 4, 5)), (NB, KB, 32, 4, 2, 2))
    else:
        # Words by k5, n5 n4 n2 n1 n0, k21 k4 k3.
        f = tl.reshape(f, (KB, NB, 32, 2, 1))
        f = tl.broadcast_to(tl.permute(f, (1, 0, 3, 2, 4)), (NB, KB, 2, 32, 16))
    return tl.reshape(f, (NB, KB * words_of(ELEMENT)))


@triton.jit
def row_factors(factors, n, block, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Factors of rows n of a block in float32; n and block: of shapes that go together."""
    pair = n // 16 * 8 + n % 8
    if GROUP == 16:
        f = tl.load(factors + ((block // 4 * (ROWS // 2) + pair) * 4 + block % 4))
        f = tl.where(n // 8 % 2 == 0, f << 16, f & -65536)
    else:
        f = tl.load(factors + (block // 2 * (ROWS // 2) + pair))
        f = ((f >> (n // 8 % 2 * 16 + block % 2 * 8)) & 255) << 23
    return f.to(tl.float32, bitcast=True)


@triton.jit
def own_scale(scale):
    """The weight's own scale, which is in front of its factors."""
    return tl.load(scale).to(tl.float32, bitcast=True)


def _int4_asm(bf16: bool, zero: bool) -> str:
    """Two words to eight pairs: pair j has nibbles j % 4 and j % 4 + 4 of word j // 4. Operands: pairs, words, [less]."""
    magic, less = ("0x43084308", "0xC308C308") if bf16 else ("0x64086408", "0xE408E408")
    kind, text = "bf16x2" if bf16 else "f16x2", ""
    if zero:
        text += "prmt.b32 l, $10, $10, 0x1010; prmt.b32 h, $10, $10, 0x3232; "
    else:
        text += f"mov.b32 l, {less}; mov.b32 h, l; "
    for j in range(8):
        word, by = f"${8 + j // 4}", 4 * (j % 4)
        if by:
            text += f"shr.u32 v, {word}, {by}; "
        text += f"lop3.b32 ${j}, {'v' if by else word}, 0x000F000F, {magic}, 0x6A; "
        text += f"add.rn.{kind} ${j}, ${j}, {('l', 'h')[j % 2]}; "
    return "{ .reg .b32 v, l, h; " + text + "}"


def _int8_asm(bf16: bool, zero: bool) -> str:
    """Two words to four pairs: pair j has bytes j % 2 and j % 2 + 2 of word j // 2. Operands: pairs, words, [less]."""
    kind, text = ("bf16x2", "mov.b32 c, 0xBF80BF80; ") if bf16 else ("f16x2", "mov.b32 c, 0xE480E480; ")
    if zero:
        text += "prmt.b32 l, $6, $6, 0x1010; prmt.b32 h, $6, $6, 0x3232; "
    for j in range(4):
        word = f"${4 + j // 2}"
        if j % 2:
            text += f"shr.u32 v, {word}, 8; "
            word = "v"
        if bf16:
            text += f"lop3.b32 u, {word}, 0x00800080, 0x43004300, 0xEA; "
            text += f"lop3.b32 ${j}, {word}, 0x007F007F, 0x43004300, 0xEA; "
            text += f"fma.rn.bf16x2 ${j}, u, c, ${j}; "
        else:
            text += f"lop3.b32 ${j}, {word}, 0x00FF00FF, 0x64806480, 0x6A; add.rn.f16x2 ${j}, ${j}, c; "
        if zero:
            text += f"add.rn.{kind} ${j}, ${j}, {('l', 'h')[j % 2]}; "
    return "{ .reg .b32 v, u, c, l, h; " + text + "}"


def _e4m3_asm(bf16: bool, factors: bool) -> str:
    """The same of 8-bit floats. Operands: pairs, words, [factors of either word]."""
    by, mask, factor = (4, "0x07F007F0", "0x7B807B80") if bf16 else (1, "0x3F803F80", "0x5C005C00")
    text = _factors(4, factor, factors)
    for j in range(4):
        word = f"${4 + j // 2}"
        if j % 2 == 0:
            text += f"shl.b32 v, {word}, 8; "
            word = "v"
        text += f"shr.u32 u, {word}, {by}; and.b32 u, u, {mask}; lop3.b32 ${j}, {word}, 0x80008000, u, 0xEA; "
        text += f"mul.rn.{'bf16x2' if bf16 else 'f16x2'} ${j}, ${j}, {'lh'[j % 2]}{j // 2}; "
    return "{ .reg .b32 v, u, l0, h0, l1, h1; " + text + "}"


def _e2m1_asm(bf16: bool, factors: bool) -> str:
    """Two words to eight pairs, as `_int4_asm`. Operands: pairs, words, [factors of either word].

    In bfloat16 a product with a sum of two powers of two is both shifts of a nibble, of its sign and of its other bits; in
    float16 their bits would meet.
    """
    text = _factors(8, "0x7E807E80" if bf16 else "0x74007400", factors)
    for j in range(8):
        word, factor = f"${8 + j // 4}", f"{'lh'[j % 2]}{j // 4}"
        text += _bf16_nibbles(j, word) if bf16 else _f16_nibbles(j, word)
        text += f"mul.rn.{'bf16x2' if bf16 else 'f16x2'} ${j}, ${j}, {factor}; "
    return "{ .reg .b32 v, u, l0, h0, l1, h1; " + text + "}"


def _bf16_nibbles(j: int, word: str) -> str:
    """Nibbles j % 4 and j % 4 + 4 of a word: signs at bits 15 and 31, the others from bits 6 and 22 on."""
    text = f"shr.u32 u, {word}, 8; " if j % 4 == 2 else ""
    mask, both = ("0x000F000F", 1 << 12 | 1 << 6) if j % 2 == 0 else ("0x00F000F0", 1 << 8 | 1 << 2)
    text += f"and.b32 v, {word if j % 4 < 2 else 'u'}, {mask}; "
    return text + f"mul.lo.u32 v, v, {both}; and.b32 ${j}, v, 0x81C081C0; "


def _f16_nibbles(j: int, word: str) -> str:
    """The same, from bits 9 and 25 on."""
    by = 4 * (j % 4)
    text = f"shl.b32 u, {word}, {12 - by}; " if by < 12 else ""
    text += f"shl.b32 v, {word}, {9 - by}; " if by <= 9 else f"shr.u32 v, {word}, {by - 9}; "
    return (
        text + f"and.b32 v, v, 0x0E000E00; lop3.b32 ${j}, {'u' if by < 12 else word}, 0x80008000, v, 0xEA; "
    )


def _factors(pairs: int, constant: str, given: bool) -> str:
    """What rows n (l) and n + 8 (h) of the first and the second word are multiplied by."""
    if not given:
        return "".join(f"mov.b32 {name}, {constant}; " for name in ("l0", "h0", "l1", "h1"))
    return "".join(
        f"prmt.b32 l{i}, {word}, {word}, 0x1010; prmt.b32 h{i}, {word}, {word}, 0x3232; "
        for i, word in enumerate((f"${pairs + 2}", f"${pairs + 3}"))
    )


def _nf4_index_asm() -> str:
    """Two words to eight pairs of codes, as 128 + code in bfloat16, less 128."""
    text = "mov.b32 c, 0xC300C300; "
    for j in range(8):
        word, by = f"${8 + j // 4}", 8 * (j % 4)
        text += (
            f"shr.u32 u, {word}, {by}; shl.b32 v, u, 12; and.b32 v, v, 0x000F0000; and.b32 u, u, 0x0000000F; "
        )
        text += f"or.b32 u, u, v; or.b32 u, u, 0x43004300; add.rn.bf16x2 ${j}, u, c; "
    return "{ .reg .b32 u, v, c; " + text + "}"


def _table(dtype: str, plane: int) -> list[str]:
    """Bytes of the 16 levels, four in a number: of the high bytes of both terms, of the low ones of either."""
    values = [(hi >> 8, hi & 255, mid & 255)[plane] for hi, mid in TERMS[dtype]]
    return [f"0x{int.from_bytes(bytes(values[at : at + 4]), 'little'):08X}" for at in range(0, 16, 4)]


def _nf4_asm(bf16: bool) -> str:
    """Two words to eight pairs of first terms and eight of second ones: pair j has both nibbles of byte j % 4 of word j // 4.

    A nibble without its highest bit chooses from either half of a table, which is what `prmt` does to four at once; copies of
    the highest bits, as bytes, choose the half.
    """
    tables, text = [_table("bfloat16" if bf16 else "float16", plane) for plane in range(3)], ""
    for i, word in enumerate(("$16", "$17")):
        text += f"and.b32 s0, {word}, 0x77777777; shr.u32 s1, s0, 16; shl.b32 u, {word}, 4; "
        for half, copies in enumerate(("0xD9C8", "0xFBEA")):
            text += f"prmt.b32 m, u, {word}, {copies}; "
            for name, (a, b, c, d) in zip("hlv", tables, strict=True):
                text += f"prmt.b32 {name}, {a}, {b}, s{half}; prmt.b32 t, {c}, {d}, s{half}; "
                text += f"lop3.b32 {name}, {name}, t, m, 0xD8; "
            for j, places in enumerate(("0x5140", "0x7362")):
                pair = 4 * i + 2 * half + j
                text += f"prmt.b32 ${pair}, l, h, {places}; prmt.b32 ${8 + pair}, v, h, {places}; "
    return "{ .reg .b32 s0, s1, u, m, t, h, l, v; " + text + "}"


#: Assembly by 2 * (has zero points, or factors) + (bfloat16).
INT4_ASM = tl.constexpr([_int4_asm(bf16, zero) for zero in (False, True) for bf16 in (False, True)])
INT8_ASM = tl.constexpr([_int8_asm(bf16, zero) for zero in (False, True) for bf16 in (False, True)])
E4M3_ASM = tl.constexpr([_e4m3_asm(bf16, factors) for factors in (False, True) for bf16 in (False, True)])
E2M1_ASM = tl.constexpr([_e2m1_asm(bf16, factors) for factors in (False, True) for bf16 in (False, True)])
NF4_INDEX_ASM = tl.constexpr(_nf4_index_asm())
NF4_ASM = tl.constexpr([_nf4_asm(bf16) for bf16 in (False, True)])
#: Operands without zero points and factors; those add two registers.
EIGHT = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 2))
SIXTEEN = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 2))
FOUR = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 2))


@triton.jit
def nibble_pairs(w, less, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Eight tensors of the shape of w (words): of words 2 i and 2 i + 1, tensor j has at 2 i and 2 i + 1 the codes of nibbles
    j % 4 and j % 4 + 4 of word j // 4. less: None, or what is added to integers of both words, pairs of floats in words; what
    floats of each word are multiplied by."""
    KIND: tl.constexpr = (1 if DTYPE == "bfloat16" else 0) + (0 if less is None else 2)
    ASM: tl.constexpr = INT4_ASM[KIND] if ELEMENT == "int4" else E2M1_ASM[KIND]
    if less is None:
        return _eight((w,), ASM, EIGHT, DTYPE)
    else:
        return _eight((w, less), ASM, EIGHT + ",r,r", DTYPE)


@triton.jit
def byte_pairs(w, less, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Four tensors of the shape of w: of words 2 i and 2 i + 1, tensor j has at 2 i and 2 i + 1 the codes of bytes j % 2 and
    j % 2 + 2 of word j // 2."""
    KIND: tl.constexpr = (1 if DTYPE == "bfloat16" else 0) + (0 if less is None else 2)
    ASM: tl.constexpr = INT8_ASM[KIND] if ELEMENT == "int8" else E4M3_ASM[KIND]
    if less is None:
        return _four((w,), ASM, FOUR, DTYPE)
    else:
        return _four((w, less), ASM, FOUR + ",r,r", DTYPE)


@triton.jit
def _eight(given, ASM: tl.constexpr, OPERANDS: tl.constexpr, DTYPE: tl.constexpr):
    """Eight tensors of pairs."""
    if DTYPE == "bfloat16":
        return tl.inline_asm_elementwise(ASM, OPERANDS, given, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASM, OPERANDS, given, dtype=(tl.float16,) * 8, is_pure=True, pack=2)


@triton.jit
def _four(given, ASM: tl.constexpr, OPERANDS: tl.constexpr, DTYPE: tl.constexpr):
    """Four tensors of pairs."""
    if DTYPE == "bfloat16":
        return tl.inline_asm_elementwise(ASM, OPERANDS, given, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASM, OPERANDS, given, dtype=(tl.float16,) * 4, is_pure=True, pack=2)


@triton.jit
def level_pairs(w, DTYPE: tl.constexpr):
    """Sixteen tensors of the shape of w: of words 2 i and 2 i + 1, tensor j has at 2 i and 2 i + 1 the first terms of both
    nibbles of byte j % 4 of word j // 4, tensor 8 + j the second ones."""
    ASM: tl.constexpr = NF4_ASM[1 if DTYPE == "bfloat16" else 0]
    if DTYPE == "bfloat16":
        return tl.inline_asm_elementwise(ASM, SIXTEEN, (w,), dtype=(tl.bfloat16,) * 16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASM, SIXTEEN, (w,), dtype=(tl.float16,) * 16, is_pure=True, pack=2)


@triton.jit
def index_pairs(w):
    """Eight tensors of the shape of w: in the order of `level_pairs` the codes themselves, as bfloat16."""
    return _eight((w,), NF4_INDEX_ASM, EIGHT, "bfloat16")


@triton.jit
def zero_pairs(zero, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """What is added to decoded codes: minus the zero points of rows n and n + 8, halves of words, as floats in words; for int4
    with the offset of its decoding, 136 or 1032."""
    OFFSET: tl.constexpr = 0 if ELEMENT == "int8" else (136 if DTYPE == "bfloat16" else 1032)
    low = (-OFFSET - ((zero << 16) >> 16)).to(tl.float32)
    high = (-OFFSET - (zero >> 16)).to(tl.float32)
    NARROW: tl.constexpr = "cvt.rn.bf16x2.f32" if DTYPE == "bfloat16" else "cvt.rn.f16x2.f32"
    return tl.inline_asm_elementwise(
        NARROW + " $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def factor_pairs(factors, DTYPE: tl.constexpr):
    """Pairs of bfloat16 factors as decoding multiplies by them: in float16, which lacks 2**14 in place of 2**126; exact of e4m3
    scales."""
    if DTYPE == "bfloat16":
        return factors
    else:
        low = (factors << 16).to(tl.float32, bitcast=True) * 2.0**-112
        high = (factors & -65536).to(tl.float32, bitcast=True) * 2.0**-112
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
        )
