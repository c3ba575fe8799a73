"""17 to 128 rows: whether `mixed_mm` is faster than `linear_small`, by the model of the one and times of the other."""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.mixed_mm.select import MULTIPROCESSORS, choose, nanoseconds
from fast.kernels.mixed_mm.variants import Weight

#: The most rows of `linear_small` and the fewest that are asked for; the most by the columns of TIMES.
LEAST, MOST, ROWS = 17, 128, (32, 64, 128)
#: Microseconds of `linear_small` on an H200 of a weight of (14336, 4096), by what it decodes. Where zero points or groups were
#: not timed, those of the element without; int4 in groups of 32 with zero points take no less than without.
TIMES = {
    Weight("int4"): (15.5, 21.9, 32.8), Weight("int4", False, 2): (21.9, 39.7, 62.8),
    Weight("int4", True): (18.3, 24.0, 53.9), Weight("int4", True, 2): (21.9, 39.7, 62.8),
    Weight("int8"): (19.6, 27.4, 39.4), Weight("e4m3"): (20.7, 28.0, 40.0),
    Weight("e2m1", False, 2): (18.2, 26.2, 41.7), Weight("e2m1", False, 4): (18.0, 25.9, 40.9),
    Weight("e4m3_mx", False, 2): (23.5, 28.9, 42.3),
}  # fmt: skip
TIMED = 14336 * 4096
#: Microseconds of a call whatever the weight; how much faster the other kernel has to be, as the model is no closer.
ONCE, MARGIN = 3.0, 0.95


@lru_cache(maxsize=4096)
def gains(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> bool:
    """Whether x (tokens, length), 17 to 128 rows, by a weight (features, length) is for `mixed_mm`."""
    one = choose(tokens, features, length, weight, multiprocessors)
    own = nanoseconds(one, tokens, features, length, multiprocessors, weight) / 1e3
    return own < MARGIN * microseconds(tokens, features, length, weight)


def microseconds(tokens: int, features: int, length: int, weight: Weight) -> float:
    """How long `linear_small` takes, of as many elements as were timed or more or fewer of them."""
    times = TIMES.get(weight) or TIMES[Weight(weight.element)]
    timed = next(us for rows, us in zip(ROWS, times, strict=True) if tokens <= rows)
    return ONCE + (timed - ONCE) * features * length / TIMED


__all__ = ["LEAST", "MOST", "TIMES", "gains", "microseconds"]
