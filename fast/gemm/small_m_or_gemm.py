"""33 to 128 rows: whether `sm90_w4a16_gemm` is faster than `linear_small`, by a model of both that was fitted to measured
times.

Both take as many steps along K as the fullest multiprocessor has, and once what a launch and parts of K cost. Up to 32 rows
`linear_small` was always faster (devices and shapes: reports/LOG.md, "Times that docstrings of `sm90_w4a16_gemm` held").
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fast.kernels.sm90_w4a16_gemm.select import MULTIPROCESSORS, TURNED, choose, rounds, stage
from fast.kernels.sm90_w4a16_gemm.variants import ATOM, Variant, Weight
from fast.kernels.triton_small_m.tilings import CACHE, LAUNCH, SECOND, tiling_of

#: The fewest rows that are asked for: of fewer `linear_small` is faster.
LEAST = 33
#: The most rows of `linear_small`.
MOST = 128


class Steps(NamedTuple):
    """Microseconds of a step. own: of 64 columns in a tile of 128 rows. half: of `linear_small`, 128 columns of 64 rows of x
    where there are no more; halves: of 64 rows of more of them, in two programs; whole: of 128 rows. 8-bit elements have no
    halves, NF4 has nothing else."""

    own: float
    half: float
    halves: float
    whole: float


#: By what is decoded. Where zero points or groups were not timed they are those of the element without, see `steps_of`.
STEPS = {
    Weight("int4"): Steps(0.485, 0.60, 0.52, 1.16), Weight("int4", True): Steps(0.49, 0.62, 0.81, 1.27),
    Weight("int4", False, 2): Steps(0.49, 1.19, 1.03, 1.5), Weight("int8"): Steps(0.522, 0.95, 0.0, 1.31),
    Weight("e4m3"): Steps(0.486, 0.90, 0.0, 1.28), Weight("e2m1", False, 2): Steps(0.43, 0.68, 0.62, 1.17),
    Weight("e2m1", False, 4): Steps(0.58, 0.71, 0.635, 1.19), Weight("e4m3_mx", False, 2): Steps(0.48, 0.93, 0.0, 1.35),
    Weight("nf4"): Steps(0.503, 1.45, 1.41, 0.0),
}  # fmt: skip
#: Microseconds of a call of `sm90_w4a16_gemm` besides its stages.
ONCE = 3.0
#: Microseconds of adding its parts of K.
PARTS = 3.9
#: Its time over that of `linear_small` has to be less: what is nearer is within the model's error.
MARGIN = 0.97


@lru_cache(maxsize=4096)
def gains(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> bool:
    """Whether x (tokens, length), 33 to 128 rows, by a weight (features, length) is for `sm90_w4a16_gemm`."""
    arguments = tokens, features, length, weight, multiprocessors
    return own_time(*arguments) < MARGIN * other_time(*arguments)


def own_time(tokens: int, features: int, length: int, weight: Weight, multiprocessors: int) -> float:
    """Microseconds of `sm90_w4a16_gemm`."""
    one = choose(tokens, features, length, weight, multiprocessors)
    round_of = length / ATOM / one.splits * own_step(one, weight) + (PARTS if one.splits > 1 else 0.0)
    return ONCE + rounds(one, tokens, features, multiprocessors) * round_of


def own_step(one: Variant, weight: Weight) -> float:
    """Microseconds of 64 columns: tiles of fewer rows are to one of 128 as `select` has it."""
    times = stage(one.tokens, weight) / stage(128, weight)
    return steps_of(weight).own * times - (TURNED / 1e3 if one.turns > 1 else 0.0)


def other_time(tokens: int, features: int, length: int, weight: Weight, multiprocessors: int) -> float:
    """Microseconds of `linear_small`."""
    tiling = tiling_of(features, length, weight.element, 0, tokens)
    steps = -(-(length // tiling.block_k) // tiling.splits)
    fullest = -(-tiling.programs(features, tokens) // multiprocessors)
    _, half, halves, whole = steps_of(weight)
    each = whole if tiling.block_m > 64 else half if tokens <= 64 else halves
    added = SECOND + 8.0 * tiling.splits * tokens * features / CACHE if tiling.splits > 1 else 0.0
    return LAUNCH + fullest * steps * each + added


def steps_of(weight: Weight) -> Steps:
    """Those that were timed; zero points and groups take `linear_small` more than they take this kernel."""
    near = weight, weight._replace(zero=False), Weight(weight.element)
    return next(STEPS[one] for one in near if one in STEPS)


__all__ = ["LEAST", "MOST", "STEPS", "gains", "other_time", "own_time", "steps_of"]
