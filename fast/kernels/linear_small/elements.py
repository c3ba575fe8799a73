"""Words of the private layout as a tile of the weight, rows and columns in order, in the lanes that have them.

An atom is 64 rows by 64 columns, `WORDS` words. By the bits of rows n and columns k (n3 is bit 3 of n), from the slowest index:

    int4    n5 n4 | n2 n1 n0 | k2 k1 | k5 | k4            nibbles of a word: k0 k3 n3
    8 bits  k5 | n5 n4 | n2 n1 n0 | k2 k1 | k4 | k3       bytes of a word:   k0 n3

A warp (n5 n4) has 16 rows, its lane (n2 n1 n0, k2 k1) rows n and n + 8 and columns k, k + 1, k + 8, k + 9 of each 16: the
fragment of `wgmma`'s first operand, so what was read becomes the operand where it is. Words 2 i and 2 i + 1 are decoded
together (`decode`), which makes one more index of pairs (int4: k0 in place of k4; 8 bits: k0 in place of k3). The assembly
takes two registers of a lane, which have to be these words: a matter of the compiler's layout, which a test looks at.
"""

import triton
import triton.language as tl

from fast.kernels.linear_small.decode import byte_pairs, int4_pairs


@triton.jit
def tile_elements(w, less, NB: tl.constexpr, KB: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """(64 NB, 64 KB) floats of w (NB, words of KB atoms). less: None, or as words of the shape of w, see `decode`."""
    if ELEMENT == "int4":
        p0, p1, p2, p3, p4, p5, p6, p7 = int4_pairs(w, less, DTYPE)
        # Nibbles by n3, k3; words by k4: new indices k4 k3 n3.
        even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
        odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))
        t = tl.reshape(tl.join(even, odd), (NB, KB, 4, 8, 4, 2, 2, 2, 2, 2))
        t = tl.permute(t, (0, 2, 9, 3, 1, 5, 7, 8, 4, 6))
    else:
        p0, p1, p2, p3 = byte_pairs(w, less, ELEMENT, DTYPE)
        # Bytes by n3; words by k3: new indices k3 n3.
        t = tl.join(tl.join(p0, p2), tl.join(p1, p3))
        t = tl.reshape(t, (NB, KB, 2, 4, 8, 4, 2, 2, 2, 2))
        t = tl.permute(t, (0, 3, 9, 4, 1, 2, 6, 8, 5, 7))
    return tl.reshape(t, (64 * NB, 64 * KB))


@triton.jit
def word_halves(w, NB: tl.constexpr, ELEMENT: tl.constexpr):
    """Of one atom along K (NB, words) the words of its first and of its second 32 columns, each (NB, half of the words)."""
    if ELEMENT == "int4":
        # Words by k5, k4.
        both = tl.permute(tl.reshape(w, (NB, 128, 2, 2)), (0, 1, 3, 2))
    else:
        both = tl.permute(tl.reshape(w, (NB, 2, 256, 2)), (0, 2, 3, 1))
    first, second = tl.split(both)
    WORDS: tl.constexpr = 256 if ELEMENT == "int4" else 512
    return tl.reshape(first, (NB, WORDS)), tl.reshape(second, (NB, WORDS))


@triton.jit
def half_elements(w, less, NB: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """(64 NB, 32) floats of one of `word_halves`; less: as words of its shape. Halves part before they are decoded: of whole
    atoms the compiler would decode words 2 i and 2 i + 2 together, as those lie side by side in what is parted afterwards."""
    if ELEMENT == "int4":
        p0, p1, p2, p3, p4, p5, p6, p7 = int4_pairs(w, less, DTYPE)
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
