"""The assembly of `mma_sparse`: codes and metadata as operands of the sparse tensor core, and the products.

Fragments of `mma.sp.m16n8k32`, whose first operand has two kept elements in each group of four along K, by lane 4 g + t (g from
0 to 7, t from 0 to 3):

    A, 16 x 32: the weight                       B, 32 x 8: the inputs            C, 16 x 8: the sums
    row g       a0: group t    a2: group t + 4   column g  b0  k = 2 t, 2 t + 1   row g       c0  c1
    row g + 8   a1             a3                          b1, b2, b3: k + 8,     row g + 8   c2  c3
    a register: the two kept elements of a group           16, 24 further         c0, c2: column 2 t; c1, c3: 2 t + 1

    e, the indices, 4 bits a group, of the lanes 4 g + s, 4 g + s + 1, where s is 2 times the selector:
    low half: row g, high half: row g + 8; the first lane has groups 0 to 3, the second one groups 4 to 7

Source: PTX ISA, "Matrix fragments for sparse mma.m16n8k32 with .f16 and .bf16 types". `ordered_metadata` knows the six pairs
of different indices in order, which `compress` writes; without it the instruction may be much slower.

A lane reads two words of eight codes of a row, 32 columns, the lanes of four the 128 columns of a turn. Byte q of word u is
group 4 u + q of the lane, and goes with group 4 u + q of the other three to instruction 2 u + q // 2, as group t (q even) or
t + 4. So codes never leave their lane:

    instruction 2 u + h, group t of its first half = columns 32 t + 16 u + 8 h + (0 .. 3), of its second half + (4 .. 7)

Its indices come from the words of four lanes: word t of a row's 128 columns has the 16 bits of word u in half u. Lane t' of
four makes the ones of place t' in those 16 bits: it takes the byte that has them, of both halves and both rows (prmt), moves
them to one half of the byte, and puts those of word 1 beside those of word 0, of word 3 beside those of word 2. This is what
the lanes 4 g + t' have to offer: instructions 2 u take places 0 and 1 by selector 0, instructions 2 u + 1 places 2 and 3 by
selector 1.

Codes in the fraction of a power of two are exact 16-bit floats, more by a number that one addition takes off: the low half of a
byte becomes 128 + 8 + c (bfloat16) or 1024 + 8 + c (float16), the high half, where its bits lie, 16 + 8 + c or 64 + 8 + c.

The loop for one row of inputs takes about half of the instructions that there is time for at the copy rate, fewer an element
than `gemv_w4a16`; to select an input for each kept code, or to make words of dense groups, takes more (counts: reports/LOG.md).
"""

#: Selectors of `prmt` that put byte q of the first word in the low half and that of the second one in the high half.
HALVES = tuple(f"0x{4 + q}{4 + q}{q}{q}" for q in range(4))
#: By dtype: mask of the two codes, what they are beside 8 + c, with the sign bit of two's complement flipped, and that negated.
CODES = {"bf16": (0x0078000F, 0x41C04308, 0xC1C0C308), "f16": (0x00F0000F, 0x54806408, 0xD480E408)}
#: Of bytes, the half that a selection takes from its first operand.
LOW_HALVES = 0x0F0F0F0F
#: What a lane has to know of its place t': selector of its bytes, by t' // 2; by t' % 2 how far its half of a byte is moved
#: down, and the factor that moves the other word's half up.
BYTES, DOWN, UP = (0x6420, 0x7531), (0, 4), (16, 1)
GROUPS_OF_WORD, WORDS, TERMS = 4, 2, 4


def decode_asm(kind: str) -> str:
    """Assembly: the first operands of the four instructions of a turn, and their indices.

    Out, four registers each: A of instructions 0, 1, 2, 3; indices of the four. In, four each: codes (words 0 and 1 of row g,
    of row g + 8); metadata of row g; of row g + 8; BYTES, DOWN and UP of the lane, and anything.
    """
    mask, magic, less = CODES[kind]
    text = "{ .reg .b32 s, v, less, m<4>, p<2>; " + f"mov.b32 less, 0x{less:08X}; "
    for row in range(2):
        for u in range(WORDS):
            word = f"${20 + 2 * row + u}"
            # The code in the high half of a byte ends below the exponent of bfloat16 once it is moved by one place.
            text += f"shr.u32 s, {word}, 1; " if kind == "bf16" else f"mov.b32 s, {word}; "
            for q in range(GROUPS_OF_WORD):
                out = 4 * (2 * u + q // 2) + row + 2 * (q % 2)
                text += (
                    f"prmt.b32 v, {word}, s, {HALVES[q]}; lop3.b32 v, v, 0x{mask:08X}, 0x{magic:08X}, 0x6A; "
                )
                text += f"add.rn.{kind}x2 ${out}, v, less; "
    return text + _indices() + "}"


def _indices() -> str:
    """Assembly: the indices of a lane's place for word 0, and for word 1; each serves two instructions."""
    text = "".join(f"prmt.b32 m{t}, ${24 + t}, ${28 + t}, $32; " for t in range(4))
    for pair in range(2):
        low, high = f"m{2 * pair}", f"m{2 * pair + 1}"
        text += f"shr.u32 {low}, {low}, $33; mul.lo.u32 {high}, {high}, $34; "
        text += f"lop3.b32 p{pair}, {low}, {high}, 0x{LOW_HALVES:08X}, 0xE4; "
    return text + "".join(
        f"prmt.b32 ${16 + at}, p0, p1, {('0x6240', '0x7351')[at // 2]}; " for at in range(4)
    )


def products_asm(kind: str) -> str:
    """Assembly: sums of the products of four instructions, from zero.

    Out: c0 to c3. In, four registers each: A of instructions 0, 1, 2, 3; their indices; b0 of the four; b1; b2; b3.
    """
    text = "{ .reg .f32 c<4>; " + "".join(f"mov.f32 c{i}, 0f00000000; " for i in range(4))
    for at in range(TERMS):
        a = ", ".join(f"${4 + 4 * at + i}" for i in range(4))
        b = ", ".join(f"${24 + 4 * i + at}" for i in range(4))
        text += (
            f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32 {{c0, c1, c2, c3}}, {{{a}}}, "
            f"{{{b}}}, {{c0, c1, c2, c3}}, ${20 + at}, 0x{at % 2}; "
        )
    return text + "".join(f"mov.f32 ${i}, c{i}; " for i in range(4)) + "}"


#: Constraints of both.
DECODE_OPERANDS = ",".join(["=&r"] * 20 + ["r"] * 16)
PRODUCT_OPERANDS = ",".join(["=&f"] * 4 + ["r"] * 36)
