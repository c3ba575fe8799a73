"""From codes as they are stored to the private layout (`elements` has its order), and back: each word, each byte once.

A word of 4-bit codes has a byte (two neighbours along K) of rows n, n + 8 at columns k, k + 8, one of 8 bits two bytes of both
rows. Rows and columns that do not exist become codes of 0, which meet inputs that are 0 and results that are not written.
"""

import triton
import triton.language as tl

from fast.kernels.triton_small_m.decode import has_nibbles, words_of


@triton.jit
def _place(i, ELEMENT: tl.constexpr):
    """Row (without bit 3) and column (without bits 3 and 0, for 8 bits without bit 0) of word i of an atom."""
    if has_nibbles(ELEMENT):
        return (i >> 7) * 16 + ((i >> 4) & 7), ((i >> 2) & 3) * 2 + ((i >> 1) & 1) * 32 + (i & 1) * 16
    else:
        n = ((i >> 7) & 3) * 16 + ((i >> 4) & 7)
        return n, ((i >> 2) & 3) * 2 + (i >> 9) * 32 + ((i >> 1) & 1) * 16 + (i & 1) * 8


@triton.jit
def _byte(codes, n, at, rows, BYTES: tl.constexpr):
    """Bytes of rows n, 0 where there is none."""
    exists = (n < rows) & (at < BYTES)
    return tl.load(codes + (n.to(tl.int64) * BYTES + at), mask=exists, other=0).to(tl.int32)


@triton.jit
def arrange_kernel(codes, words, rows, BYTES: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """The words of an atom: program (atom along K, atom along N). codes: uint8 (rows, BYTES); TILE: words of an atom."""
    atom = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    i = tl.arange(0, TILE)
    n, k = _place(i, ELEMENT)
    n, k = n + tl.program_id(1) * 64, k + tl.program_id(0) * 64
    word = i * 0
    if has_nibbles(ELEMENT):
        for place in tl.static_range(4):
            # A byte of nf4 stays one.
            c = _byte(codes, n + place % 2 * 8, (k + place // 2 * 8) // 2, rows, BYTES)
            if ELEMENT == "nf4":
                word = word | (c << (8 * place))
            else:
                word = word | ((c & 15) << (4 * place)) | ((c >> 4) << (4 * place + 16))
    else:
        for place in tl.static_range(4):
            word = word | (_byte(codes, n + place % 2 * 8, k + place // 2, rows, BYTES) << (8 * place))
    tl.store(words + (atom * TILE + i), word)


@triton.jit
def restore_kernel(
    words, codes, rows, BYTES: tl.constexpr, ATOMS: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """TILE bytes of a row of codes: program (row, tile), as rows may be more than 65535. ATOMS: atoms along K."""
    n = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = (n // 16 % 4) * 128 + (n % 8) * 16
    half = n // 8 % 2
    if has_nibbles(ELEMENT):
        k = at * 2
        i = row + ((k >> 1) & 3) * 4 + ((k >> 5) & 1) * 2 + ((k >> 4) & 1)
        place = ((k >> 3) & 1) * 2 + half
    else:
        k = at
        i = ((k >> 5) & 1) * 512 + row + ((k >> 1) & 3) * 4 + ((k >> 4) & 1) * 2 + ((k >> 3) & 1)
        place = (k & 1) * 2 + half
    WORDS: tl.constexpr = words_of(ELEMENT)
    atom = (n // 64).to(tl.int64) * ATOMS + k // 64
    word = tl.load(words + (atom * WORDS + i), mask=at < BYTES, other=0)
    if has_nibbles(ELEMENT) and ELEMENT != "nf4":
        code = ((word >> (4 * place)) & 15) | (((word >> (4 * place + 16)) & 15) << 4)
    else:
        code = (word >> (8 * place)) & 255
    tl.store(codes + (n.to(tl.int64) * BYTES + at), code.to(tl.uint8), mask=at < BYTES)
