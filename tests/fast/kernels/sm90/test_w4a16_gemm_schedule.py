"""Cuts of a product into tiles: each element is in one, small ones fill the last wave, and the kernel takes what they say."""

import random
from itertools import pairwise

import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_w4a16_gemm.host import (
    Grid,
    Schedule,
    Variant,
    cuts,
    grid_of,
    least_of,
    longest,
    scheduled,
)
from tests.emulator.faults import assert_seen, at_night, every_second, unchanged
from tests.fast.kernels.sm90.products import require_nvrtc, w4a16_gemm
from tests.fast.kernels.sm90.test_w4a16_gemm import expected, given, stored

BF16 = torch.bfloat16
#: Of the shapes that models have, and of few columns and clusters.
GRIDS = [
    Grid(1024, 112, 256, 128, 132), Grid(1024, 112, 256, 192, 132), Grid(512, 112, 256, 192, 132),
    Grid(700, 48, 256, 64, 132), Grid(8192, 56, 256, 192, 66), Grid(129, 8, 128, 64, 132), Grid(300, 3, 64, 16, 7),
    Grid(1, 1, 256, 64, 132), Grid(2049, 32, 256, 0, 132), Grid(1000, 5, 48, 32, 1),
]  # fmt: skip


def schedules(grid):
    """All that are looked at."""
    for cut, whole in cuts(grid):
        clusters = min(grid.clusters, sum(grid.counts(Schedule(cut, whole, 1))))
        large = grid.counts(Schedule(cut, whole, 1))[0]
        for shares in {clusters, clusters - large % clusters}:
            yield Schedule(cut, whole, shares)


def tiles_of(grid, one):
    """By clusters, (column, token, tokens) of their tiles, as the kernel takes them, groups of tokens left out."""
    plain = range(grid.columns - one.cut), range(grid.columns - one.cut, grid.columns)
    whole = [
        (column, at * grid.large, grid.large)
        for kind in (0, 1) for column in plain[kind] for at in range(one.whole[kind])
    ]  # fmt: skip
    rest = [
        (column, one.whole[kind] * grid.large + at * grid.small, grid.small)
        for kind in (0, 1) for column in plain[kind] for at in range(grid.rest(one.whole[kind]))
    ]  # fmt: skip
    clusters = min(grid.clusters, len(whole) + len(rest))
    taken = [whole[at::clusters] for at in range(clusters)]
    for at in range(clusters):
        place = (at - len(whole)) % clusters
        if place < one.shares:
            taken[at] += rest[place :: one.shares]
    return taken


def covered_once(grid, one):
    """Whether each token of each column is in one tile, and no tile begins behind the last token."""
    tiles = [tile for cluster in tiles_of(grid, one) for tile in cluster]
    assert len(tiles) == sum(grid.counts(one))
    seen = {column: [] for column in range(grid.columns)}
    for column, token, tokens in tiles:
        assert token < grid.tokens
        seen[column].append((token, token + tokens))
    for spans in map(sorted, seen.values()):
        assert spans[0][0] == 0
        assert spans[-1][1] >= grid.tokens
        assert all(end == begin for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize("grid", GRIDS)
def test_each_token_is_in_one_tile(grid):
    covered_once(grid, scheduled(grid, 0.7))
    some = [*schedules(grid)]
    assert bool(some) == bool(grid.small)
    for one in random.Random(0).sample(some, min(12, len(some))):
        covered_once(grid, one)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_longest_cluster(grid):
    """The formula against the tiles one by one."""
    for one in schedules(grid):
        took = [
            sum(1.0 if tokens == grid.large else 0.625 for *_, tokens in cluster)
            for cluster in tiles_of(grid, one)
        ]
        assert longest(grid, one, 1.0, 0.625) == max(took), one


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9, 1.0])
def test_what_is_left_out_is_not_shorter(grid, ratio):
    """Schedules are many, and a model waits: those that a bound leaves out would not have been taken."""
    least = min((longest(grid, one, 1.0, ratio) for one in schedules(grid)), default=float("inf"))
    found = longest(grid, scheduled(grid, ratio), 1.0, ratio)
    assert found == min(least, longest(grid, scheduled(grid._replace(small=0), ratio), 1.0, ratio))
    assert least_of(grid, 1.0, ratio) <= found * (1 + 1e-12)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9, 1.0])
def test_no_schedule_is_longer_than_whole_tiles(grid, ratio):
    plain = Schedule(0, (grid.all_whole, 0), 1)
    assert longest(grid, scheduled(grid, ratio), 1.0, ratio) <= longest(grid, plain, 1.0, ratio)


def test_half_waves():
    """1024 rows, 448 tiles for 132: three waves of whole tiles, and halves of the others, in place of four."""
    grid = Grid(1024, 112, 256, 128, 132)
    one = scheduled(grid, 0.67)
    assert longest(grid, one, 1.0, 0.67) == pytest.approx(3.67)
    whole, small = grid.counts(one)
    assert whole <= 3 * 132
    assert small <= 132


def test_small_tiles_that_are_as_dear_are_not_taken():
    """Where nothing is gained all tiles are whole."""
    assert scheduled(Grid(1024, 112, 256, 128, 132), 1.0) == Schedule(0, (4, 0), 132)
    assert scheduled(Grid(2048, 33, 256, 128, 132), 0.6) == Schedule(0, (8, 0), 132)


#: Variant, shape (M, N, K), schedule, clusters at once.
CASES = {
    "small tiles alone": (Variant(32, 1, 1, 3, 16), (40, 256, 128), Schedule(0, (0, 0), 3), 3),
    "behind whole ones": (Variant(32, 1, 1, 3, 16), (70, 384, 256), Schedule(0, (2, 0), 2), 2),
    "in some columns": (Variant(48, 1, 1, 3, 32), (100, 384, 128), Schedule(1, (3, 1), 3), 3),
    "of some clusters": (Variant(32, 1, 1, 4, 16), (90, 384, 128), Schedule(1, (3, 1), 2), 3),
    "three boxes": (Variant(64, 1, 1, 3, 48), (40, 128, 128), Schedule(0, (0, 0), 1), 1),
    "pairs": (Variant(64, 2, 1, 4, 32), (100, 640, 128), Schedule(2, (2, 1), 2), 2),
}  # fmt: skip


def product(name, early=True, change=unchanged):
    """By the emulator, and what is right."""
    variant, (m, n, k), one, at_once = CASES[name]
    w, dense = stored("int4_g128", n, k)
    x, bias = given(m, n, k, BF16, BF16)
    covered_once(grid_of(variant, m, n, at_once), one)
    made = w4a16_gemm(x, w, bias, variant, one, early=early, seed=1, at_once=at_once, change=change)
    return made, expected(x, dense, bias)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", at_night(CASES, "behind whole ones", "pairs"))
def test_bits(name, early):
    """Those of `dequantize`, whatever the tile."""
    require_nvrtc()
    assert_same_bits(*product(name, early))


#: A fault of the kernel: case, and what is changed.
FAULTS = {
    "bytes of whole tiles are waited for": ("behind whole ones", "all_rows * PANEL)", "TOKENS * PANEL)"),
    "bytes of boxes without tokens are waited for": ("pairs", "all_rows * PANEL)", "PAIR * share * PANEL)"),
    "cut columns are the first": ("in some columns", "first = cut ? columns - p.cut : 0", "first = 0"),
    "small tiles begin as whole ones": ("in some columns", "* SMALL : (before", "* TOKENS : (before"),
    "tiles that no cluster takes": ("of some clusters", "if (next >= step)", "if (next >= step - 1)"),
    "a box of other rows": ("three boxes", "to + i * PANEL", "to"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_faults_are_seen(fault):
    require_nvrtc()
    name, *change = FAULTS[fault]
    assert_seen(change, is_right, [name])


def is_right(name, change):
    return torch.equal(*product(name, True, change))
