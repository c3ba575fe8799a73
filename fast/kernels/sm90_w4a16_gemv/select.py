"""Which variant of `sm90_w4a16_gemv` multiplies 1 to 16 rows by a preshuffled weight, and where it is faster than
`linear_small`.

Rules of measured times (reports/LOG.md, "Times that docstrings of `sm90_w4a16_gemv` held"):

* Launches are programmatic: two programs a multiprocessor leave the next kernel a place where there is work for both. To ask
  for its weight then, into the L2 cache (`ahead`), gains only where programs have a multiprocessor of their own.
* int4 up to 8 rows: one or two rows straight from memory (`direct.cu`), the largest weights by one block in three phases.
* 8 bits: straight from memory where programs are one wave, else through shared memory up to 4 rows, as every program reads x.
* Small weights: straight from memory, a program for each 16 rows. int4 in groups of 64: one program a multiprocessor, as the
  scales of two leave them too few stages.
* NF4 up to 16 rows, decoded by the table alone; e2m1 of small weights. x of more than UPFRONT rows comes in stages, and
  programs are as tall as leaves every multiprocessor one, so that x is read by few.
"""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.sm90_w4a16_gemv.variants import DIRECT, FACTORED, STEP, Direct, Form, Variant, fitted

#: The most rows of x that gain, by the element, of any weight.
GAINING = {"int4": 8, "nf4": 16}
#: The most rows of x that gain, and the most elements of a weight of which they do.
GAINING_SMALL = {"e2m1": (8, 1 << 23), "e4m3_mx": (8, 1 << 23)}
#: Elements of a weight up to which it is small: words come straight from memory, a program for each 16 rows.
SMALL = 1 << 22
#: Warps of a program of a small weight: its columns are divided among them.
WARPS_OF_SMALL = 24
#: Loads under way in a lane, of a small weight.
LOADS_OF_SMALL = 4
#: Rows of x up to which a small weight goes straight from memory: one tile.
MOST_OF_SMALL = 8
#: Rows of x up to which int4 in groups of fewer columns than a step gains: scales take the room of stages.
SHORT_GROUPS = 2
#: Rows of x up to which int4 gains whose programs fill less than a device.
FEW_PROGRAMS = 4
#: Rows of x up to which 8 bits gain through shared memory, where blocks of 64 rows are one wave.
ONE_WAVE = 4
#: Rows of x up to which 8 bits gain through shared memory, of rows longer than LONG.
LONG_ROWS = 4
#: Rows of x up to which 8 bits gain by the slabs of one wave of programs, without factors and with them.
GAINING_SLABS = {14: (16, 16), 7: (8, 8), 2: (2, 4)}
#: Rows of x that a variant takes at most: two tiles of the tensor core's 8.
MOST_ROWS = 16
#: Rows of x of a tile.
TILES = (8, 16)
#: Multiprocessors of a device: programs that fill it at one to a multiprocessor.
FULL = 132
#: Programs that nearly fill a device.
ENOUGH = 90
#: Parts of K at most: programs of the largest portable cluster.
MOST_SPLITS = 8
#: Steps along K that a part has at least, so that its ring is filled.
FEWEST_STEPS = 8
#: Columns beyond which a row is long: its x takes the room of stages.
LONG = 8192
#: Straight from memory: programs that leave no multiprocessor out, nearly.
WHOLE = 120
#: Straight from memory: warps of a program of more than four slabs, which share them.
WARPS = 28
#: The same, of 8 bits and up to four slabs.
WARPS_OF_FEW = 24
#: Straight from memory, 8 bits: loads under way in a lane.
LOADS = 4
#: Straight from memory, int4: loads under way in a lane.
LOADS_OF_INT4 = 2
#: Straight from memory, int4: slabs of a program at most.
MOST_SLABS = 7
#: Straight from memory, 8 bits and one row of x: warps and loads, by the slabs.
ALONE = {14: (28, 4), 7: (21, 4), 3: (15, 6), 2: (24, 4)}
#: Elements whose programs are tall, one a multiprocessor.
TALL = ("nf4", "e2m1")
#: Clusters of so many programs that run at once, one program a multiprocessor.
CLUSTERS = {2: 66, 4: 30, 8: 14}
#: Rows of x that programs read before they begin; more come in stages.
UPFRONT = 2
#: Bytes of a word of NF4 that the table decodes: all four, which is the fastest at every number of rows.
TABLED = 4


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
