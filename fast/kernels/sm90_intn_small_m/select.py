"""Which tiles of `sm90_intn_small_m` a product gets: the shortest time by what a multiprocessor takes, fitted to measured
times.

`reports/data/linear_bits_tiles.json` has the times, `tests/fast/kernels/sm90/test_choices_of_few_rows.py` holds the rule to
them.
"""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.sm90_intn_small_m.variants import STEP, Form, Variant, fitted, longest
from fast.launch.hopper import AT_ONCE
from fast.launch.hopper import MULTIPROCESSORS as PROCESSORS

#: Nanoseconds that a program takes for STEP columns of K, with codes of 2, 3, 5 and 6 bits; where a multiprocessor has several
#: programs, its time over their number. Groups of 32 without zero points; others change all tiles nearly alike.
Rates = tuple[int, int, int, int]
#: Rows of x at most.
MOST_ROWS = 128
#: Rows of a weight from which it is large.
LARGE = 8192
#: The most rows of x that are multiplied by a large weight as it is stored: of more the dense weight, made for the call, is no
#: slower (times: reports/LOG.md).
MOST_OF_LARGE = 96
#: The same of a weight that is not large.
MOST_OF_SMALL = 32
#: Parts of K at most.
MOST_SPLITS = 8
#: Stages that a part has at least: the ring has to be filled first.
STAGES_EACH = 4
#: Nanoseconds of a product without stages.
START = 3000.0
#: Nanoseconds of a wave of programs for each row of x and part of K: sums are left and added, between barriers of a cluster.
PART = 10.0
#: The tile that is tried for several numbers of rows.
T64 = Variant(64, 8, 1, 2, 1, 1, 4, 1)
#: Its rates.
R64 = (1360, 1510, 1610, 1780)
#: By rows of x at most: tiles and their rates, of which `choose` takes the one of least `cost`. Programs of seven slabs, 112
#: rows, are one for each multiprocessor where a weight has 14336 rows; small ones, several to a multiprocessor, fill it where a
#: weight has few rows. T64 reads the weight twice for more rows of x than 64, which pays where a tile for all of them would be
#: parts of K in clusters of four, which do not all run at once. Tiles of 48 and 96 rows were not timed: their rates are halfway
#: between their neighbours'.
TILES: tuple[tuple[int, dict[Variant, Rates]], ...] = (
    (1, {Variant(8, 1, 1, 8, 1, 4, 4, 4): (47, 57, 75, 73), Variant(8, 7, 1, 4, 1, 4, 5, 1): (330, 440, 590, 520)}),
    (4, {Variant(8, 1, 1, 8, 1, 4, 4, 4): (51, 62, 82, 83), Variant(8, 7, 1, 4, 1, 4, 5, 1): (340, 450, 590, 530)}),
    (8, {Variant(8, 1, 1, 8, 1, 4, 4, 4): (60, 73, 94, 96), Variant(8, 7, 1, 4, 1, 4, 5, 1): (350, 460, 600, 550)}),
    (16, {Variant(16, 2, 1, 4, 1, 2, 4, 3): (220, 250, 310, 310), Variant(16, 7, 1, 4, 1, 2, 6, 1): (460, 570, 710, 710)}),
    (32, {Variant(32, 2, 2, 2, 1, 1, 4, 3): (530, 700, 780, 810), Variant(32, 7, 1, 2, 1, 2, 4, 1): (730, 900, 980, 1070)}),
    (48, {Variant(48, 7, 1, 2, 1, 2, 4, 1): (990, 1190, 1290, 1350), T64: R64}),
    (64, {Variant(64, 7, 1, 2, 1, 2, 3, 1): (1250, 1470, 1600, 1620), T64: R64,
          Variant(64, 4, 2, 1, 1, 1, 3, 2): (1530, 1620, 1700, 1820)}),
    (96, {Variant(96, 7, 1, 2, 1, 1, 4, 1): (1790, 2070, 2320, 2220), T64: R64,
          Variant(96, 8, 1, 2, 1, 1, 3, 1): (2120, 2200, 2150, 2380)}),
    (128, {Variant(128, 7, 1, 2, 1, 1, 4, 1): (2330, 2660, 3040, 2820), T64: R64,
           Variant(128, 8, 1, 2, 1, 1, 3, 1): (2890, 2890, 2690, 2990)}),
)  # fmt: skip


@lru_cache(maxsize=4096)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none fits."""
    tiles = next(tiles for most, tiles in TILES if count <= most)
    costs: dict[Variant, float] = {}
    for tile, rates in tiles.items():
        if (one := placed(tile, form, count, n, k)) is not None:
            costs[one] = cost(one, rates, form, count, n, k)
    return min(costs, key=costs.__getitem__, default=None)


def most_rows(n: int) -> int:
    """The most rows of x that are multiplied by a weight of n rows as it is stored; more are by the dense weight."""
    return MOST_OF_LARGE if n >= LARGE else MOST_OF_SMALL


def cost(variant: Variant, rates: Rates, form: Form, count: int, n: int, k: int) -> float:
    """Nanoseconds of a product by a variant: those of its start, its waves, and the programs of the busiest multiprocessor."""
    programs, waves = busiest(variant, count, n)
    added = PART * waves * variant.tokens * variant.splits
    return START + added + programs * rate(rates, form.bits) * k / STEP / variant.splits


def busiest(variant: Variant, count: int, n: int) -> tuple[int, int]:
    """Programs that one multiprocessor has in all waves, and how many waves there are: so many clusters run at once."""
    clusters = variant.programs(count, n) // variant.splits
    whole, rest = divmod(clusters, AT_ONCE[variant.splits] * variant.at_once)
    return whole * variant.at_once + -(-rest * variant.splits // PROCESSORS), whole + (rest > 0)


def rate(rates: Rates, bits: int) -> float:
    """A tile's rate for codes of a width: that of 4 bits, which other kernels multiply, is between those of 3 and 5."""
    two, three, five, six = rates
    return {2: two, 3: three, 4: (three + five) / 2, 5: five, 6: six}[bits]


def placed(variant: Variant, form: Form, count: int, n: int, k: int) -> Variant | None:
    """A variant as a product has room for it: steps, phases and stages at most its own, parts of K as many as gain.

    Where multiprocessors have room for twice as many programs, each is made two along K, a cluster.
    """
    steps = longest(form, k, variant.steps)
    # Warps that share rows take units in turn, which a short stage has fewer of.
    one = variant._replace(steps=steps, phases=min(variant.phases, steps * STEP // form.unit))
    stages = k // (STEP * steps)
    while (
        2 * one.splits <= MOST_SPLITS
        and 2 * one.programs(count, n) <= PROCESSORS * one.at_once
        and stages >= 2 * one.splits * STAGES_EACH
    ):
        one = one._replace(splits=2 * one.splits)
    return fitted(form, one, k)


__all__ = [
    "MOST_ROWS",
    "PROCESSORS",
    "TILES",
    "Rates",
    "busiest",
    "choose",
    "cost",
    "most_rows",
    "placed",
    "rate",
]
