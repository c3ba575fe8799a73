"""`sm90_w4a16_gemm`, many rows by a preshuffled weight on a GPU: the variants of its source, which of them a shape gets, and
what is launched.

A variant says how large tiles are and what of the weight is decoded. A shape gets the one of the shortest time by the cost
model (`fast.cost`), fitted to measured times. A tile takes its stages, and with parts of K what it takes to add them.
Persistent programs have tiles of one or two sizes (below); with parts of K, programs that do not fit the GPU at once make
another round. The model only has to order variants (devices and shapes: reports/LOG.md, "Times that docstrings of
`sm90_w4a16_gemm` held").

Where clusters are persistent, a product is cut into whole tiles, then small ones that fill the last wave. Columns of features
are of two kinds: the last `cut` ones have fewer whole tiles than the others. What whole tiles of a column leave of the tokens
is for small ones. Clusters take whole tiles in turn, then small ones: all go on in turn, or those that have a whole tile less
take all of them (`schedule.cuh`). Each element of the result is summed by one program, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast.cost import Coefficients, Time, first_row
from fast.kernels.hopper.wgmma import header, product
from fast.kernels.triton_small_m.layout import FACTORED
from fast.launch import cuda
from fast.launch.cuda import (
    BIAS,
    GROUP,
    KINDS,
    MOST_SHARED,
    MULTIPROCESSORS,
    CudaLaunch,
    Kernel,
    Maps,
    at_once,
    processors_of,
)
from fast.launch.driver import tensor_map
from fast.launch.launcher import FLOAT_NAMES, Call
from fast.scale_factors import ArrangedWeight, check_row_scales

#: Stages that one warpgroup is behind the other, so that one multiplies while the other writes its tile.
SKEW = 2
#: Warpgroups that multiply, 64 features each.
GROUPS = 2
#: Rows and columns of an atom of the weight.
ATOM = 64
#: Features of a tile.
FEATURES = GROUPS * ATOM
#: Tokens whose sums one warpgroup leaves for another at once.
GATHERED = 64
#: Bytes of a row of x in a stage.
PANEL = 128
#: Bytes of an atom, by elements in the order of the numbers that the source gives them.
ELEMENTS = {"int4": 2048, "int8": 4096, "e4m3": 4096, "e2m1": 2048, "e4m3_mx": 4096, "nf4": 2048}
MOST_STAGES = 12
#: Bytes of the table of 16 levels, each once for every bank.
TABLE = 2048
#: Products of 16 columns that are given to the tensor core together, and decoded for together.
BATCH = 2


#: PTX's names of the dtypes of x.
PTX_KINDS = {"bfloat16": "bf16", "float16": "f16"}
#: Elements of K of an instruction.
INSTRUCTION = 16


class Weight(NamedTuple):
    """What a variant decodes. element: of ELEMENTS; zero: whether there are zero points; parts: blocks of scales in a stage."""

    element: str
    zero: bool = False
    parts: int = 1

    @property
    def stage(self) -> int:
        """Bytes of a stage of FEATURES rows: words, scales, zero points."""
        return GROUPS * ELEMENTS[self.element] + self.parts * FEATURES * self._each

    @property
    def table(self) -> int:
        """Bytes of the table of levels."""
        return TABLE if self.element == "nf4" else 0

    @property
    def _each(self) -> int:
        """Bytes of a row's scale, or factor, and zero point."""
        if self.element in FACTORED:
            return self.parts // 2
        return 6 if self.zero else 4


class Variant(NamedTuple):
    """tokens: of a tile, a multiple of 16 up to 256. pair: programs of a cluster along the features, which share tokens.

    splits: programs along K. stages: of the ring. small: tokens of smaller tiles, a multiple of 16 as well, 0 where there are
    none, as with splits. k_slices: 2 where warpgroups split the stages of a tile, which are even then (sliced K), without
    pairs, splits and small tiles. scaled: whether rows of x have scales. grouped: whether they are sorted by expert and
    have weights of their own (`experts.py`), without clusters and scales.
    """

    tokens: int
    pair: int
    splits: int
    stages: int
    small: int = 0
    k_slices: int = 1
    scaled: bool = False
    grouped: bool = False

    @property
    def threads(self) -> int:
        """Of a program: warpgroups that multiply, and one that loads."""
        return 128 * (GROUPS * self.k_slices + 1)

    @property
    def cluster(self) -> int:
        """Programs of a cluster."""
        return self.pair * self.splits

    @property
    def chunk(self) -> int:
        """Tokens of a warpgroup's outgoing tile."""
        return self.tokens if self.splits > 1 else (16 if (self.tokens | self.small) % 32 else 32)

    @property
    def box(self) -> int:
        """Rows of x that are copied at once where they are not a whole tile's: 64, or fewer where programs share less, that
        divide what they share of a small tile."""
        share = (self.small or self.tokens) // self.pair
        return next(
            rows for rows in (64, 32, 16, 8) if share >= rows and (not self.small or share % rows == 0)
        )

    @property
    def name(self) -> str:
        """Such as t256c2k1s5, t256+192c1k1s5, t96c1k1s10u2, t64c1k1s12u2x, t256+128c1k1s5g."""
        small = f"+{self.small}" if self.small else ""
        marks = (f"u{self.k_slices}" if self.k_slices > 1 else "") + "x" * self.scaled + "g" * self.grouped
        return f"t{self.tokens}{small}c{self.pair}k{self.splits}s{self.stages}{marks}"

    def ring(self, weight: Weight) -> int:
        """Bytes of the ring."""
        return self.stages * (self.tokens * PANEL + weight.stage)

    def shared(self, weight: Weight) -> int:
        """Bytes of dynamic shared memory: ring, outgoing tiles (of the ring's bytes with splits), then or where rows have
        scales those and biases, sums of those that split K, levels, barriers, alignment."""
        outgoing = GROUPS * 2 * self.chunk * PANEL if self.splits == 1 else 0
        outgoing += GROUPS * (self.tokens + 128) * 4 if self.splits > 1 or self.scaled else 0
        sums = GROUPS * min(GATHERED, self.tokens) * 256 if self.k_slices > 1 else 0
        return self.ring(weight) + outgoing + sums + weight.table + 16 * self.stages + 1024


def fitted(
    tokens: int,
    pair: int,
    splits: int,
    weight: Weight,
    small: int = 0,
    k_slices: int = 1,
    scaled: bool = False,
) -> Variant:
    """The variant with as many stages as shared memory holds, at most MOST_STAGES, the same number for each turn."""
    none = Variant(tokens, pair, splits, 0, small, k_slices, scaled)
    each = none._replace(stages=1).shared(weight) - none.shared(weight)
    most = min(MOST_STAGES, (MOST_SHARED - none.shared(weight)) // each)
    return none._replace(stages=most - most % k_slices)


def with_scales(one: Variant, weight: Weight) -> Variant:
    """The same of rows that have scales."""
    return fitted(one.tokens, one.pair, one.splits, weight, one.small, one.k_slices, True)


class Problem(NamedTuple):
    """What is multiplied. x: the name of the dtype of x and y."""

    weight: Weight
    x: str


def _defines(variant: Variant, problem: Problem) -> dict[str, int]:
    weight = problem.weight
    return {
        "TOKENS": variant.tokens, "SMALL": variant.small or variant.tokens, "BOX": variant.box, "GROUPS": GROUPS,
        "K_SLICES": variant.k_slices, "STAGES": variant.stages, "PAIR": variant.pair, "SPLITS": variant.splits,
        "CHUNK": variant.chunk, "BATCH": BATCH, "PARTS": weight.parts, "ZERO": int(weight.zero),
        "SCALED": int(variant.scaled), "GROUPED": int(variant.grouped), "HALF": int(problem.x == "float16"),
        "SKEW": SKEW if variant.splits == variant.k_slices == 1 and variant.stages > SKEW else 0,
        "ELEMENT": list(ELEMENTS).index(weight.element), "OUT": KINDS.index(problem.x),
    }  # fmt: skip


def _generated(variant: Variant, problem: Problem) -> dict[str, str]:
    """Products of 64 features, their columns in registers, of each tile."""
    kind = PTX_KINDS[problem.x]
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) + ', "l"(b)'
    products = (
        product(
            tokens, INSTRUCTION, f"{kind}.{kind}", "const u32 (&a)[4], u64 b", "{{{0}, {1}, {2}, {3}}}, {4}, 1, 1, 1, 0", inputs
        )
        for tokens in sorted({variant.tokens, variant.small} - {0})
    )  # fmt: skip
    return {"products.h": header(False, products)}


KERNEL = Kernel(
    "sm90_w4a16_gemm",
    Path(__file__).parent,
    _defines,
    own=(
        "schedule.cuh",
        "experts.cuh",
        "decode.cuh",
        "factors.cuh",
        "levels.cuh",
        "load.cuh",
        "sliced_k.cuh",
    ),
    generated=_generated,
    instead="dense weights are multiplied",
    fails_whole=True,
)


C = Coefficients("sm90_w4a16_gemm")


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, length) and a weight (features, length)."""
    best, least = None, float("inf")
    # Those of one size first: they say which of the others need not be looked at.
    for one in sorted(candidates(tokens, length, weight), key=lambda one: one.small > 0):
        if one.small and bound(one, tokens, features, length, weight, multiprocessors) >= least:
            continue
        taken = nanoseconds(one, tokens, features, length, weight, multiprocessors)
        if taken < least:
            best, least = one, taken
    if best is None:
        raise ValueError(
            f"no variant takes {tokens} rows of {length} columns; `fast.gemm.families` says what it takes"
        )
    return best


def bound(
    one: Variant, tokens: int, features: int, length: int, weight: Weight, multiprocessors: int
) -> float:
    """What a variant with small tiles is no quicker than, by the model, whatever the schedule."""
    grid = grid_of(one, tokens, features, at_once(one.cluster, multiprocessors))
    return least_of(grid, *(tile(one, each, length, weight) for each in (one.tokens, one.small))) * C.mixed


def candidates(tokens: int, length: int, weight: Weight) -> Iterator[Variant]:
    """Variants with tiles no larger than the tokens ask for, and parts of K of whole pairs of stages; and those with small
    tiles, which have neither parts nor pairs."""
    tiles = C.small_m_tiles if tokens <= C.small_m else C.tiles
    largest = next((one for one in tiles if one >= tokens), max(tiles))
    for count in tiles:
        for pair, splits in C.clusters:
            if count <= largest and splits <= length // (2 * ATOM):
                k_slices = k_slices_of(tokens, count, pair * splits, weight)
                yield fitted(count, pair, splits, weight, k_slices=k_slices)
        for small in C.small if tokens > C.small_m else ():
            if small < count <= largest:
                yield fitted(count, 1, 1, weight, small)


def k_slices_of(tokens: int, tile: int, cluster: int, weight: Weight) -> int:
    """Warpgroups that split K: 2 where few rows meet programs without neighbours, but for int4 in tiles of 128, which gain
    nothing by it (times: reports/LOG.md)."""
    return 2 if tokens <= C.small_m and cluster == 1 and (tile < 128 or weight.element != "int4") else 1


def nanoseconds(
    one: Variant,
    tokens: int,
    features: int,
    length: int,
    weight: Weight,
    multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """How long all of a product takes, by the model."""
    whole, once = tile(one, one.tokens, length, weight), C.pair if one.pair > 1 else 0.0
    if one.splits > 1:
        return rounds(one, tokens, features, multiprocessors) * whole + once
    grid = grid_of(one, tokens, features, at_once(one.cluster, multiprocessors))
    if not one.small:
        return longest(grid, scheduled(grid, 1.0), whole, whole) + once
    small = tile(one, one.small, length, weight)
    return longest(grid, scheduled(grid, ratio_of(one, weight)), whole, small) * C.mixed + once


def small_m_microseconds(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> float:
    """How long up to 128 rows take, by coefficients that were fitted to those alone."""
    one = choose(tokens, features, length, weight, multiprocessors)
    tiles, parts = rounds(one, tokens, features, multiprocessors), C.small_m_parts if one.splits > 1 else 0.0
    return Time(tiles, length / ATOM / one.splits, small_m_step(one, weight), parts, C.small_m_once).total


def small_m_step(one: Variant, weight: Weight) -> float:
    """Microseconds of 64 columns of those: tiles of fewer rows are to one of 128 as in `stage`."""
    times = stage(one.tokens, weight) / stage(128, weight)
    timed = first_row(C.small_m_steps, **weight._asdict())["us"]
    return timed * times - (C.sliced / 1e3 if one.k_slices > 1 else 0.0)


def tile(one: Variant, tokens: int, length: int, weight: Weight) -> float:
    """Nanoseconds of a tile of as many tokens."""
    added = C.parts + C.part_token * tokens if one.splits > 1 else 0.0
    each = stage(tokens, weight) - (C.sliced if one.k_slices > 1 else 0.0)
    return Time(1, length / ATOM / one.splits, each, C.tile + added).total


@lru_cache(maxsize=1024)
def stage(tokens: int, weight: Weight) -> float:
    """Nanoseconds of a stage, on a line between those that were timed."""
    times: list[float] = first_row(C.stages, **weight._asdict())["ns"]
    first = min(2, max(0, tokens // 64 - 1))
    return times[first] + (times[first + 1] - times[first]) * (tokens / 64 - 1 - first)


def ratio_of(one: Variant, weight: Weight) -> float:
    """The time of a small tile over that of a whole one."""
    return stage(one.small or one.tokens, weight) / stage(one.tokens, weight)


def rounds(one: Variant, tokens: int, features: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """How many tiles follow one another on the fullest multiprocessor."""
    clusters = -(-tokens // one.tokens) * -(-features // (FEATURES * one.pair))
    return -(-clusters // at_once(one.cluster, multiprocessors))


# Which tiles a product is cut into.

#: Whole tiles of a column that are tried, fewer than would hold all tokens by up to this number.
FEWER = 4
#: Waves of whole tiles that are tried, fewer than all whole tiles fill by up to this number.
WAVES = 3


class Schedule(NamedTuple):
    """cut: columns at the end that have whole[1] tiles of the larger size, others have whole[0]; shares: clusters that take
    small tiles."""

    cut: int
    whole: tuple[int, int]
    shares: int


class Grid(NamedTuple):
    """What is cut. columns: of a cluster's features; small: 0 where there are no small tiles; clusters: that run at once."""

    tokens: int
    columns: int
    large: int
    small: int
    clusters: int

    @property
    def all_whole(self) -> int:
        """Tiles that hold all tokens of a column."""
        return -(-self.tokens // self.large)

    def rest(self, whole: int) -> int:
        """Small tiles of a column behind whole ones."""
        return max(0, -(-(self.tokens - whole * self.large) // self.small)) if self.small else 0

    def counts(self, one: Schedule) -> tuple[int, int]:
        """Whole tiles and small ones."""
        (first, second), plain = one.whole, self.columns - one.cut
        rest = self.rest(first) * plain + (self.rest(second) * one.cut if one.cut else 0)
        return first * plain + second * one.cut, rest


def grid_of(one: Variant, tokens: int, features: int, clusters: int) -> Grid:
    """Of a variant without parts of K. clusters: that run at once."""
    return Grid(tokens, -(-features // (FEATURES * one.pair)), one.tokens, one.small, max(1, clusters))


def longest(grid: Grid, one: Schedule, large: float, small: float) -> float:
    """The time of the cluster that has most. large, small: times of tiles."""
    whole, rest = grid.counts(one)
    clusters = min(grid.clusters, whole + rest)
    waves, more = divmod(whole, clusters)
    # Those with a whole tile less come first, then those that have one more, where those take small ones at all.
    first = waves * large + -(-rest // one.shares) * small
    second = -(-max(0, rest - (clusters - more)) // one.shares) if one.shares > clusters - more else 0
    return max(first, (waves + 1) * large + second * small if more else 0.0)


@lru_cache(maxsize=4096)
def scheduled(grid: Grid, ratio: float) -> Schedule:
    """The schedule that ends first. ratio: time of a small tile over that of a whole one.

    Every new number of rows asks, while a model waits: what could not end first if all clusters had the same is left out.
    """
    best = Schedule(0, (grid.all_whole, 0), min(grid.clusters, grid.all_whole * grid.columns))
    least = longest(grid, best, 1.0, ratio)
    for cut, whole in cuts(grid):
        large, small = grid.counts(Schedule(cut, whole, 1))
        clusters = min(grid.clusters, large + small)
        if (large + small * ratio) / clusters >= least:
            continue
        # By all clusters, and by those that have a whole tile less.
        for shares in {clusters, clusters - large % clusters}:
            one = Schedule(cut, whole, shares)
            if (taken := longest(grid, one, 1.0, ratio)) < least:
                best, least = one, taken
    return best


def least_of(grid: Grid, large: float, small: float) -> float:
    """What no schedule is quicker than: all clusters with the same, of tiles that are full. large, small: times of tiles."""
    each = min(large / grid.large, small / grid.small) if grid.small else large / grid.large
    return grid.columns * grid.tokens * each / grid.clusters


def cuts(grid: Grid) -> Iterator[tuple[int, tuple[int, int]]]:
    """Columns that are cut, and whole tiles: fewer in all columns, or in as many as make the whole waves fewer."""
    least = max(0, grid.all_whole - FEWER)
    for whole in range(least, grid.all_whole + 1) if grid.small else ():
        yield 0, (whole, 0)
        for fewer in range(least, whole):
            top = whole * grid.columns // grid.clusters
            for waves in range(max(0, top - WAVES), top + 1):
                cut = -(-(whole * grid.columns - waves * grid.clusters) // (whole - fewer))
                if 0 < cut < grid.columns:
                    yield cut, (whole, fewer)


#: Pointers of a launch; behind them scales of rows, where these have some. x is read through its tensor map alone.
POINTERS = ("x", "codes", "scale", "zero", "bias", "y")
#: Of them those that tensor maps are made of.
MAPPED = (0, 5)
#: Numbers of the source's `Problem`: tokens, features, steps, each, bias_kind, group, cut, whole (two), shares, nibble.
NUMBERS = "11i4x"
#: Four bits, which the kernel is told: no compiler may know them.
NIBBLE = 15


def sm90_w4a16_gemm(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """x (..., K) times the transpose of what `dequantize` gives of a weight (N, K) in x's dtype, plus bias (N): (..., N).

    Sums are float32 over all of K, in an order that only shapes, dtypes and the device say; the bias is added in float32, and
    the result rounded once to x's dtype. x_scale: float32, one for each row of x, by which its sums are multiplied in float32
    before that: x is then the rows' codes, which are exact in its dtype. Operands are those that the family takes
    (`fast.gemm.families`); None where the variant does not compile or load. key, record: see `dispatch`, of a call without
    x_scale. ValueError for other scales.
    """
    launch = launch_for(x, w, bias, x_scale)
    if launch is None:
        return None
    y: torch.Tensor = call_of(launch, x, w, bias, x_scale).result("y", key, record)
    return y


def launch_for(
    x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None, x_scale: torch.Tensor | None = None
) -> CudaLaunch | None:
    """What multiplies such operands; its pointers are its `names`. None and errors as `sm90_w4a16_gemm`."""
    rows = x.numel() // w.shape[1]
    check_row_scales(x_scale, x, rows, KERNEL.name)
    variant = choose(rows, *w.shape, weight_of(w), processors_of(x.get_device()))
    return launch_of(w, rows, x.dtype, x.get_device(), variant, scaled=x_scale is not None)


def launch_of(
    w: ArrangedWeight, rows: int, dtype: torch.dtype, device: int, variant: Variant, *,
    scaled: bool = False, schedule: Schedule | None = None,
) -> CudaLaunch | None:  # fmt: skip
    """The launch of a variant, scaled: of rows that have scales; None where it does not compile or load. schedule: by default
    what `scheduled` has for it."""
    (features, length), weight = w.shape, weight_of(w)
    problem = Problem(weight, FLOAT_NAMES[dtype])
    one = with_scales(variant, weight) if scaled else variant
    shared = one.shared(weight)
    if not cuda.is_loadable(KERNEL, one, problem, device, shared):
        return None
    grid = grid_of(one, rows, features, cuda.clusters_at_once(KERNEL, one, problem, shared, device))
    cuts = schedule or scheduled(grid, ratio_of(one, weight))
    numbers = (
        rows, features, length // ATOM, (w.group or length) // ATOM or 1, BIAS, GROUP, cuts.cut, *cuts.whole, cuts.shares,
        NIBBLE,
    )  # fmt: skip
    sizes = {"numbers": (NUMBERS, numbers), "behind": ("", ())}
    names = (*POINTERS, "x_scale")
    if not scaled:
        names, sizes = POINTERS, {"numbers": (f"{NUMBERS}Q", (*numbers, 0))}
    maps = Maps(lambda x, y: described(one, rows, length, features, x, y), 1, MAPPED)
    return CudaLaunch(KERNEL, one, problem, names, programs_of(one, grid, cuts), shared, maps=maps, **sizes)


def call_of(
    launch: CudaLaunch,
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
) -> Call:
    """The call whose launch made "y"."""
    scales = {} if x_scale is None else {"x_scale": x_scale}
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, "bias": bias, **scales})
    call.allocate("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    call.launch(launch, launch.names)
    return call


def weight_of(w: ArrangedWeight) -> Weight:
    """What the kernel decodes."""
    return Weight(w.element, w.zero is not None, max(1, ATOM // (w.group or ATOM)))


def programs_of(variant: Variant, grid: Grid, schedule: Schedule) -> int:
    """Programs to launch: with splits a cluster for each tile, else at most the clusters that run at once, which persist."""
    tiles = sum(grid.counts(schedule))
    return (tiles if variant.splits > 1 else min(tiles, grid.clusters)) * variant.cluster


def described(one: Variant, tokens: int, length: int, features: int, x: int, y: int) -> bytes:
    """The tensor maps of a variant, of x (tokens, length) and y (tokens, features) at two addresses."""
    result = tensor_map(x, tokens, 2 * length, (one.tokens // one.pair, PANEL))
    result += tensor_map(x, tokens, 2 * length, (one.box, PANEL))
    return result + tensor_map(y, tokens, 2 * features, (min(one.chunk, 256), PANEL))


__all__ = [
    "ATOM",
    "ELEMENTS",
    "FEATURES",
    "GROUPS",
    "KERNEL",
    "NUMBERS",
    "PANEL",
    "POINTERS",
    "Grid",
    "Problem",
    "Schedule",
    "Variant",
    "Weight",
    "call_of",
    "candidates",
    "choose",
    "described",
    "fitted",
    "grid_of",
    "k_slices_of",
    "launch_for",
    "launch_of",
    "least_of",
    "longest",
    "nanoseconds",
    "programs_of",
    "ratio_of",
    "rounds",
    "scheduled",
    "sm90_w4a16_gemm",
    "small_m_microseconds",
    "small_m_step",
    "stage",
    "weight_of",
    "with_scales",
]
