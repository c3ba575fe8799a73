"""Which variant a product gets, where it is faster than `linear_small`: by times of an H100, 1 to 16 rows, of weights of
(14336, 4096), (4096, 14336), (4096, 4096), (6144, 4096) and (28672, 4096); CUDA graphs, each call another weight.

Launches are programmatic, and what counts besides bytes is how the next kernel begins. Two programs to a multiprocessor where
there is work for one leave room for it: its barriers are there and its programs wait when the last sum is written (two
blocks, two phases; 0.5 to 1 us of 22). Asking for its weight then, into the L2 cache, costs 1.5 to 4 us, since memory is
busy; where programs have a multiprocessor of their own it gains 0.3 to 1 (`ahead`). x by a warp of its own is faster from one
row on.

By an H200: int4 of one or two rows straight from memory, two loads under way, and (28672, 4096) by one block in three
phases, whose ends leave room: in groups of 64 6.5 us of (6144, 4096) at one row for 7.2 by a stream, 4.9 of (4096, 4096)
for 5.5, 11.8 of (4096, 14336) for 12.8, 21.3 of (28672, 4096) for 24.5 in two blocks; a block of four such layers 46.4
for 51.5. Of 8 bits without factors such kernels are let in late and ask ahead, which gains 2 to 4 percent: 16.4 us of
(14336, 4096) at one row for 16.9, 8.0 of (6144, 4096) for 8.8; int8 17.7 for 18.1 at eight.

int4 up to 8 rows: 13.0 to 13.9 us of (14336, 4096) where `linear_small` takes 15.0, 25 to 26 of (28672, 4096) for 30.6, 7.4
to 8.0 of (6144, 4096) for 9.0 to 9.4.

int8, e4m3 and MXFP8, beside `linear_small`: straight from memory (`direct.cu`) (28672, 4096) 42 to 46 us for 46 to 51 up to 16
rows, (4096, 4096) 7.9 and 8.0 for 9.0 and 9.4 of one row, MXFP8 of (14336, 4096) 22.5 to 23.7 for 23.8 to 24.3 up to 8 rows;
through shared memory int8 of (14336, 4096) 22.6 to 23.3 for 23.0 to 23.4 up to 4, (6144, 4096) 10.5 to 11.1 for 12.1 to 12.9,
(4096, 14336) 22.5 to 23.9 for 23.3 to 24.6. 16 rows of x, read by every program, cost both more than `linear_small`.

(1024, 4096) straight from memory, a program for each 16 rows: int4 3.5, 3.8, 4.4 us and 8 bits 3.6, 4.1, 4.6 to 4.9 of 1, 2, 8
rows, where four parts of K take 4.2 to 4.7, 4.3 to 4.9, 4.9 to 5.5 and `linear_small` 4.7 to 5.5 in two launches.
int4 in groups of 64, (14336, 4096): 14.5 us of 8 rows by one program a multiprocessor, 19.0 by two, whose scales leave them two
stages each, 16.7 by `linear_small`.

NF4 up to 16 rows of the first three, all by its table: 21.0, 22.0, 22.7, 25, 25.3 us of (14336, 4096) at 1, 2, 4, 8, 16 rows,
where `linear_small` takes 32.5 to 40.2; half by the table and half by permutations 22.5 to 27.4, by permutations alone 28 to
32. e2m1 gains of small weights alone ((1024, 4096): 4.4 us for 5.0), and loses 2 to 40 percent of others. Clocks of a quarter
of a multiprocessor for a warp's word, 16 rows by 16 columns, as the instructions say; memory at 4.2 TB/s is 32:

    clocks                     integers   instructions   shared memory, 8 and 16 rows of x
    NF4, half by a table       36         29, 34         34, 42
    NF4, all by a table        8          18, 23         50, 58
    NF4, none by a table       64         39, 44         18, 26

Their x comes in stages where it has more than UPFRONT rows, and programs are as tall as leaves every multiprocessor one, so
that x is read by few.
"""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.linear_skinny.variants import DIRECT, FACTORED, STEP, Direct, Form, Variant, fitted

#: The most rows of x that gain, by the element: of any weight; of at most as many elements as stand beside.
GAINING = {"int4": 8, "nf4": 16}
GAINING_SMALL = {"e2m1": (8, 1 << 23), "e4m3_mx": (8, 1 << 23)}
#: Elements of a weight that is small where words come straight from memory; warps, loads, and the most rows of x.
SMALL, WARPS_OF_SMALL, LOADS_OF_SMALL, MOST_OF_SMALL = 1 << 22, 24, 4, 8
#: Those of int4 in groups of fewer columns than a step, and of weights that fill less than a device; of 8 bits through shared
#: memory, of one wave and of long rows.
SHORT_GROUPS, FEW_PROGRAMS, ONE_WAVE, LONG_ROWS = 2, 4, 4, 4
#: Those of 8 bits by the slabs of one wave of programs, without factors and with them.
GAINING_SLABS = {14: (16, 16), 7: (8, 8), 2: (2, 4)}
#: The most rows that a variant takes, and rows of its tiles.
MOST_ROWS, TILES = 16, (8, 16)
#: Multiprocessors; programs that nearly fill them; the most parts of K, and the fewest steps of one; columns of a long row.
FULL, ENOUGH, MOST_SPLITS, FEWEST_STEPS, LONG = 132, 90, 8, 8, 8192
#: Where words come straight from memory: programs that leave no multiprocessor out; warps of one, and of few slabs; loads
#: under way.
WHOLE, WARPS, WARPS_OF_FEW, LOADS = 120, 28, 24, 4
#: Of int4 loads, and the most slabs; of 8 bits and one row of x warps and loads, by the slabs.
LOADS_OF_INT4, MOST_SLABS = 2, 7
ALONE = {14: (28, 4), 7: (21, 4), 3: (15, 6), 2: (24, 4)}
#: Elements whose programs are tall, and clusters of so many programs that run at once, one a multiprocessor.
TALL, CLUSTERS = ("nf4", "e2m1"), {2: 66, 4: 30, 8: 14}
#: Rows of x that such programs read before they begin; bytes of a word of NF4 that a table decodes.
UPFRONT, TABLED = 2, 4


def gains(form: Form, count: int, n: int, k: int) -> bool:
    """Whether so many rows are multiplied faster than by `linear_small`."""
    if _small(form, TILES[0], count, n, k) is not None:
        return True
    few, small = GAINING_SMALL.get(form.element, (0, 0))
    most = few if n * k <= small else _most_rows(form, n, k)
    return count <= most and choose(form, count, n, k) is not None


def _most_rows(form: Form, n: int, k: int) -> int:
    """The most rows that gain, of weights that are not small."""
    if form.element == "int4":
        short = 0 < form.group < STEP and not (form.group == STEP // 2 and ENOUGH <= n // 128 <= FULL)
        return min(SHORT_GROUPS if short else MOST_ROWS, GAINING["int4"] if _fills(n, k) else FEW_PROGRAMS)
    if form.element not in DIRECT:
        return GAINING.get(form.element, 0)
    if form.element != "e4m3_mx" and form.group:
        return 0
    if ENOUGH <= n // 64 <= FULL:
        return ONE_WAVE
    if k > LONG:
        return LONG_ROWS if _fills(n, k) else 0
    return GAINING_SLABS.get(_slabs(n), (0, 0))[form.element in FACTORED]


def _fills(n: int, k: int) -> bool:
    """Whether blocks of 64 rows, and parts of K of them, nearly fill a device."""
    return n // 64 * min(MOST_SPLITS, max(1, k // STEP // FEWEST_STEPS)) >= ENOUGH and n // 64 * 2 >= ENOUGH


def _slabs(n: int) -> int:
    """Slabs of a program where those of n rows are one wave that leaves no multiprocessor out; 0 where none are."""
    return next(
        (slabs for slabs in range(1, 17) if n % (16 * slabs) == 0 and WHOLE <= n // 16 // slabs <= FULL), 0
    )


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | Direct | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k), multiples of 128; None where what programs
    keep of x, or of scales, is too long."""
    tokens = next(size for size in TILES if count <= size)
    if form.element in TALL or (form.element == "e4m3_mx" and not _fills(n, k)):
        return _tall(form, tokens, count, n, k)
    small = _small(form, tokens, count, n, k)
    return small or _direct(form, tokens, count, n, k) or _stream(form, tokens, count, n, k)


def _small(form: Form, tokens: int, count: int, n: int, k: int) -> Direct | None:
    """Straight from memory, where programs of 16 rows are fewer than multiprocessors; None for factors, and where it is not."""
    if n * k > SMALL or n // 16 >= WHOLE or count > MOST_OF_SMALL or form.element in FACTORED or form.zero:
        return None
    one = Direct(tokens, 1, min(WARPS_OF_SMALL, k // 64), LOADS_OF_SMALL)
    return one if one.takes(form, count, n, k) else None


def _direct(form: Form, tokens: int, count: int, n: int, k: int) -> Direct | None:
    """Straight from memory, where programs of that are one wave: int4 of one or two rows, 8 bits by `_of_bytes`; None else."""
    slabs = _slabs(n)
    if not slabs:
        return None
    if form.element == "int4":
        few = count <= UPFRONT and slabs <= MOST_SLABS and _fills(n, k)
        sizes = (WARPS // slabs, LOADS_OF_INT4) if few else None
    else:
        sizes = _of_bytes(form, slabs, count, n, k) if form.element in DIRECT else None
    if sizes is None:
        return None
    # Those of factors were not timed with what lets kernels overlap.
    overlap = form.element not in FACTORED
    one = Direct(tokens, slabs, min(sizes[0], k // 64), sizes[1], overlap, overlap)
    return one if one.takes(form, count, n, k) else None


def _of_bytes(form: Form, slabs: int, count: int, n: int, k: int) -> tuple[int, int] | None:
    """Phases and loads of 8 bits. Without factors one row by what was timed, more rows of the largest weights, of small ones,
    and of those between from five rows on; None for others, and for long rows by more than one or two rows of x."""
    factored = form.element in FACTORED
    if not factored and count == 1 and slabs in ALONE:
        warps, loads = ALONE[slabs]
        return warps // slabs, loads
    between = 2 < slabs < 14 and not factored and not (slabs == 7 and count > ONE_WAVE)
    if between or ENOUGH <= n // 64 <= FULL or (k > LONG and count > 1 + factored):
        return None
    return (WARPS if slabs > 4 else WARPS_OF_FEW) // slabs, LOADS


def _stream(form: Form, tokens: int, count: int, n: int, k: int) -> Variant | None:
    """Two blocks where those nearly fill a device (of int4 to two rows one in three phases; for the many scales of short groups
    one program a multiprocessor); else one, and parts of K until they do; one where scales leave no room."""
    steps, splits = k // STEP, 1
    phased = form.element == "int4" and count <= UPFRONT and n // 128 >= ENOUGH
    if phased and (one := fitted(form, (tokens, 1, 3, 1), count, steps, 2, streamed=True)) is not None:
        return one
    alone = form.element == "int4" and 0 < form.group < STEP and n // 128 <= FULL
    each = {"at_once": 1, "ahead": True} if alone else {"at_once": 2}
    if (
        n // 128 >= ENOUGH
        and (two := fitted(form, (tokens, 2, 2, 1), count, steps, streamed=True, **each)) is not None
    ):
        return two
    while splits < MOST_SPLITS and n // 64 * splits < ENOUGH and steps // (2 * splits) >= FEWEST_STEPS:
        splits *= 2
    if not _fills(n, k):
        return fitted(form, (tokens, 1, 4, splits), count, steps, 1, ahead=True)
    if k > LONG and (form.element != "int4" or count <= UPFRONT):
        return fitted(form, (tokens, 1, 4, splits), count, steps, 1, streamed=True, ahead=True)
    phases = 3 if form.element == "int4" else 4
    return fitted(form, (tokens, 1, phases, splits), count, steps, 2, streamed=True)


def _tall(form: Form, tokens: int, count: int, n: int, k: int) -> Variant | None:
    """One program a multiprocessor, with sixteen warps."""
    possible = [blocks for blocks in (1, 2, 4) if n % (64 * blocks) == 0]
    blocks = next((blocks for blocks in possible if n // (64 * blocks) <= FULL), possible[-1])
    steps, programs, splits = k // STEP, n // (64 * blocks), 1
    while splits < MOST_SPLITS and programs <= CLUSTERS[2 * splits] and steps // (2 * splits) >= FEWEST_STEPS:
        splits *= 2
    sizes, rest = (tokens, blocks, 4 // blocks, splits), {"streamed": count > UPFRONT, "ahead": splits > 1}
    return fitted(form, sizes, count, steps, 1, tabled=TABLED, **rest)


__all__ = ["GAINING", "GAINING_SMALL", "MOST_ROWS", "TILES", "choose", "gains"]
