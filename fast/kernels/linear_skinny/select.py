"""Which variant a product gets, where it is faster than `linear_small`.

int4 as measured on an H200 and an H100 (g128; 1 to 16 rows; four shapes of an 8-billion-parameter model): clusters of more than
two programs cost, x in every program does (so few rows alone gain), phases of fewer than four warps do. int8 and e4m3 have
twice the bytes and gain nothing.

The others as measured on an H100, up to 16 rows of the same shapes. NF4, all by its table: 21.0, 22.0, 22.7, 25, 25.3 us of
(14336, 4096) at 1, 2, 4, 8, 16 rows, where `linear_small` takes 32.5 to 40.2; half by the table and half by permutations 22.5
to 27.4, by permutations alone 28 to 32. e2m1 and e4m3 in blocks gain of small weights alone ((1024, 4096): 4.4 and 4.7 us for
5.0 and 5.6), and lose 2 to 40 percent of others: 112 or 128 programs wait for few copies at a time. Clocks of a quarter of a
multiprocessor for a warp's word, 16 rows by 16 columns, as the instructions say; memory at 4.2 TB/s is 32:

    clocks                     integers   instructions   shared memory, 8 and 16 rows of x
    NF4, half by a table       36         29, 34         34, 42
    NF4, all by a table        8          18, 23         50, 58
    NF4, none by a table       64         39, 44         18, 26

x comes in stages where it has more than UPFRONT rows, and programs are as tall as leaves every multiprocessor one, so that x is
read by few.
"""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.linear_skinny.variants import STEP, Form, Variant, fitted

#: The most rows of x of elements that gain by any weight; and by weights of at most as many elements as stand beside.
GAINING = {"int4": 2, "nf4": 16}
GAINING_SMALL = {"int4": (4, 1 << 24), "e2m1": (8, 1 << 23), "e4m3_mx": (8, 1 << 23)}
#: The most rows that a variant takes, and rows of its tiles.
MOST_ROWS, TILES = 16, (8, 16)
#: Multiprocessors; programs that there should be at least; the most parts of K, and the fewest steps of one.
FULL, ENOUGH, MOST_SPLITS, FEWEST_STEPS = 132, 128, 8, 8
#: Blocks of 64 rows of a program, and warps that share a block's stages.
BLOCKS, PHASES = 1, 4
#: Elements whose programs are tall, and clusters of so many programs that run at once, one a multiprocessor.
TALL, CLUSTERS = ("nf4", "e2m1", "e4m3_mx"), {2: 66, 4: 30, 8: 14}
#: Rows of x that such programs read before they begin; bytes of a word of NF4 that a table decodes.
UPFRONT, TABLED = 2, 4


def gains(form: Form, count: int, n: int, k: int) -> bool:
    """Whether so many rows are multiplied faster than by `linear_small`."""
    few, small = GAINING_SMALL.get(form.element, (0, 0))
    return count <= max(GAINING.get(form.element, 0), few if n * k <= small else 0)


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k), multiples of 128; None where what programs
    keep of x, or of scales, is too long."""
    tokens = next(size for size in TILES if count <= size)
    if form.element in TALL:
        return _tall(form, tokens, count, n, k)
    steps, programs, splits = k // STEP, n // (64 * BLOCKS), 1
    while splits < MOST_SPLITS and programs * splits < ENOUGH and steps // (2 * splits) >= FEWEST_STEPS:
        splits *= 2
    at_once = 1 if programs * splits <= FULL else 2
    return fitted(form, (tokens, BLOCKS, PHASES, splits), count, steps, at_once)


def _tall(form: Form, tokens: int, count: int, n: int, k: int) -> Variant | None:
    """One program a multiprocessor, with sixteen warps."""
    possible = [blocks for blocks in (1, 2, 4) if n % (64 * blocks) == 0]
    blocks = next((blocks for blocks in possible if n // (64 * blocks) <= FULL), possible[-1])
    steps, programs, splits = k // STEP, n // (64 * blocks), 1
    while splits < MOST_SPLITS and programs <= CLUSTERS[2 * splits] and steps // (2 * splits) >= FEWEST_STEPS:
        splits *= 2
    sizes, streamed = (tokens, blocks, 4 // blocks, splits), count > UPFRONT
    return fitted(form, sizes, count, steps, 1, streamed=streamed, tabled=TABLED)


__all__ = ["GAINING", "GAINING_SMALL", "MOST_ROWS", "TILES", "choose", "gains"]
