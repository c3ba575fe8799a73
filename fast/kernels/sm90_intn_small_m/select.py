"""Which tiles of `sm90_intn_small_m` a product gets: the shortest time by what a multiprocessor takes, fitted to measured
times (`reports/gpu/family_times.csv`)."""

from __future__ import annotations

from functools import lru_cache

from fast.cost import Coefficients, Time, first_row, quickest
from fast.kernels.sm90_intn_small_m.variants import STEP, Form, Variant, fitted, longest
from fast.launch.hopper import AT_ONCE
from fast.launch.hopper import MULTIPROCESSORS as PROCESSORS

C = Coefficients("sm90_intn_small_m")
#: Rows of x at most.
MOST_ROWS = 128


@lru_cache(maxsize=4096)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none fits."""
    times = [
        (one, cost(one, rates, form, count, n, k))
        for tile, rates in tiles_of(count)
        if (one := placed(tile, form, count, n, k)) is not None
    ]
    return quickest(times)


def tiles_of(count: int) -> list[tuple[Variant, list[int]]]:
    """The tiles that are tried for `count` rows of x, with their rates by the width of codes."""
    variants = first_row(C.tiles, rows=count)["variants"]
    return [(Variant(*one["tile"]), one["ns"]) for one in variants]


def most_rows(n: int) -> int:
    """The most rows of x that are multiplied by a weight of n rows as it is stored; more are by the dense weight."""
    return int(first_row(C.most_rows, n=n)["rows"])


def cost(variant: Variant, rates: list[int], form: Form, count: int, n: int, k: int) -> float:
    """Nanoseconds of a product by a variant: those of its start, its waves, and the programs of the busiest multiprocessor."""
    programs, waves = busiest(variant, count, n)
    once = C.start + C.part * waves * variant.tokens * variant.splits
    return Time(programs, k / STEP / variant.splits, rate(rates, form.bits), once=once).total


def busiest(variant: Variant, count: int, n: int) -> tuple[int, int]:
    """Programs that one multiprocessor has in all waves, and how many waves there are: so many clusters run at once."""
    clusters = variant.programs(count, n) // variant.splits
    whole, rest = divmod(clusters, AT_ONCE[variant.splits] * variant.at_once)
    return whole * variant.at_once + -(-rest * variant.splits // PROCESSORS), whole + (rest > 0)


def rate(rates: list[int], bits: int) -> float:
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
        2 * one.splits <= C.most_splits
        and 2 * one.programs(count, n) <= PROCESSORS * one.at_once
        and stages >= 2 * one.splits * C.stages_each
    ):
        one = one._replace(splits=2 * one.splits)
    return fitted(form, one, k)


__all__ = [
    "MOST_ROWS",
    "busiest",
    "choose",
    "cost",
    "most_rows",
    "placed",
    "rate",
    "tiles_of",
]
