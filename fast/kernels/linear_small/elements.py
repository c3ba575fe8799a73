"""Words of the private layout as a tile of the weight, rows and columns in order, in the lanes that have them.

An atom is 64 rows by 64 columns, `WORDS` words. By the bits of rows n and columns k (n3 is bit 3 of n), from the slowest index:

    int4    n5 n4 | n2 n1 n0 | k2 k1 | k5 | k4            nibbles of a word: k0 k3 n3
    8 bits  k5 | n5 n4 | n2 n1 n0 | k2 k1 | k4 | k3       bytes of a word:   k0 n3

A warp (n5 n4) has 16 rows, its lane (n2 n1 n0, k2 k1) rows n and n + 8 and columns k, k + 1, k + 8, k + 9 of each 16: the
fragment of `wgmma`'s first operand, so what was read becomes the operand where it is. Words 2 i and 2 i + 1 are decoded
together (`decode`), which makes one more index of pairs (int4: k0 in place of k4; 8 bits: k0 in place of k3).
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
def tile_halves(w, less, NB: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """The same of one atom along K as its two halves of 32 columns, (64 NB, 32) each."""
    if ELEMENT == "int4":
        p0, p1, p2, p3, p4, p5, p6, p7 = int4_pairs(w, less, DTYPE)
        even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
        odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))
        t = tl.reshape(tl.join(even, odd), (NB, 4, 8, 4, 2, 2, 2, 2, 2))
        t = tl.permute(t, (0, 1, 8, 2, 6, 7, 3, 5, 4))
    else:
        p0, p1, p2, p3 = byte_pairs(w, less, ELEMENT, DTYPE)
        t = tl.join(tl.join(p0, p2), tl.join(p1, p3))
        t = tl.reshape(t, (NB, 2, 4, 8, 4, 2, 2, 2, 2))
        t = tl.permute(t, (0, 2, 8, 3, 5, 7, 4, 6, 1))
    return tl.split(tl.reshape(t, (64 * NB, 32, 2)))


@triton.jit
def spread(first, second, NB: tl.constexpr, KB: tl.constexpr, ELEMENT: tl.constexpr):
    """Words of rows (32 NB), of all columns or of the first and the second 32 of an atom, in the shape of the atoms' words."""
    if second is None:
        if ELEMENT == "int4":
            z = tl.reshape(first, (NB, 1, 32, 1))
            z = tl.broadcast_to(z, (NB, KB, 32, 16))
        else:
            z = tl.reshape(first, (NB, 1, 32, 1))
            z = tl.broadcast_to(z, (NB, 2 * KB, 32, 16))
    else:
        both = tl.join(first, second)
        if ELEMENT == "int4":
            z = tl.broadcast_to(tl.reshape(both, (NB, 32, 1, 2, 1)), (NB, 32, 4, 2, 2))
        else:
            z = tl.permute(tl.reshape(both, (NB, 32, 2)), (0, 2, 1))
            z = tl.broadcast_to(tl.reshape(z, (NB, 2, 32, 1)), (NB, 2, 32, 16))
    return tl.reshape(z, (NB, (512 if ELEMENT == "int4" else 1024) * KB))
