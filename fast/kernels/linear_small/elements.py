"""Words of the private layout as a tile of the weight, rows and columns in order, in the lanes that have them.

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

from fast.kernels.linear_small.decode import byte_pairs, factor_pairs, index_pairs, level_pairs, nibble_pairs


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
    """(64 NB, 64 KB) first and second terms of the levels of w, see `fast.codebook_scales`."""
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
