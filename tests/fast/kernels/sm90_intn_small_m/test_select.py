"""The rule of `sm90_intn_small_m` against times of an H200, and its model of a multiprocessor."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from ao_lab.config.recipe import named
from fast.kernels.sm90_intn_small_m.host import form_of
from fast.kernels.sm90_intn_small_m.select import MOST_ROWS, TILES, busiest, choose, cost, rate
from fast.kernels.sm90_intn_small_m.variants import Form, Variant

TIMES = Path(__file__).resolve().parents[4] / "reports/data/linear_bits_tiles.json"
INT3 = Form(3, 32, False, True, False)
#: How much slower the rule's variant is than the quickest, and at most where it is slower yet: zero points, which the rates are
#: not fitted to, and a shape whose quickest tile is none of the rule's.
LOSS = 0.035
LOSSES = {((14336, 4096), "int3_g32_asymmetric", 128): 0.11, ((4096, 14336), "int2_g32", 16): 0.075}


def measured():
    """Microseconds on an H200 of variants, by shape, scheme and rows of x."""
    for row in json.loads(TIMES.read_text())["times"]:
        times = {Variant(*map(int, name.split(","))): us for name, us in row["us"].items()}
        yield (tuple(row["shape"]), row["scheme"], row["rows"]), times


MEASURED = dict(measured())


def form_named(scheme, length):
    return form_of(named(scheme), (16, length), 1, True)


def loss(problem):
    """How much slower the rule's variant is than the quickest of those that were timed; it is among those."""
    shape, scheme, count = problem
    times = MEASURED[problem]
    return times[choose(form_named(scheme, shape[1]), count, *shape)] / min(times.values()) - 1


def test_the_rule_is_among_the_quickest():
    losses = {problem: loss(problem) for problem in MEASURED}
    assert len(losses) == 112
    assert {at: each for at, each in losses.items() if each > LOSSES.get(at, LOSS)} == {}
    assert sum(losses.values()) / len(losses) < 0.005


def test_the_model_tells_times():
    """Those of chosen variants within 11 percent, in groups of 32 without zero points; in the mean within 2."""
    errors = {}
    for (shape, scheme, count), times in MEASURED.items():
        if not scheme.endswith("_g32"):
            continue
        form = form_named(scheme, shape[1])
        one = choose(form, count, *shape)
        tiles = next(tiles for most, tiles in TILES if count <= most)
        rates = next(rates for tile, rates in tiles.items() if is_tile(one, tile))
        errors[shape, scheme, count] = cost(one, rates, form, count, *shape) / 1e3 / times[one] - 1
    assert {at: each for at, each in errors.items() if abs(each) > 0.11} == {}
    assert math.fsum(map(abs, errors.values())) / len(errors) < 0.02


def is_tile(one, tile):
    """Whether a variant is a tile in its place: parts of K, stages, steps and programs at once are those of the product."""
    return one[:4] == tile[:4]


def test_tiles_cover_all_counts():
    counts = [most for most, _ in TILES]
    assert counts == sorted(counts)
    assert counts[-1] == MOST_ROWS
    for most, tiles in TILES:
        assert all(one.tokens * 2 >= most and one.tokens % 8 == 0 and one.splits == 1 for one in tiles)
        assert len({one[:4] for one in tiles}) == len(tiles)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_rates_grow_with_rows(bits):
    """A tile takes no less for more rows of x, and hardly more for each."""
    for (_, tiles), (_, more) in pairwise(TILES):
        pairs = [
            (one, two) for one in tiles for two in more if one[1:4] == two[1:4] and one.tokens <= two.tokens
        ]
        for tile, other in pairs:
            here, there = rate(tiles[tile], bits), rate(more[other], bits)
            assert here <= there
            assert there / other.tokens <= 1.1 * here / tile.tokens or tile.tokens == other.tokens == 8


def test_four_bits_are_halfway():
    assert [rate((10, 20, 40, 70), bits) for bits in (2, 3, 4, 5, 6)] == [10, 20, 30, 40, 70]


@pytest.mark.parametrize(
    ("variant", "count", "n", "wanted"),
    [
        (Variant(64, 8, 1, 2, 2, 1, 4, 1), 128, 4096, (1, 1)),
        (Variant(128, 8, 1, 2, 4, 1, 3, 1), 128, 4096, (2, 2)),
        (Variant(64, 4, 2, 1, 8, 1, 3, 2), 64, 4096, (3, 2)),
        (Variant(8, 1, 1, 8, 1, 4, 4, 4), 1, 14336, (7, 2)),
        (Variant(8, 1, 1, 8, 2, 4, 4, 4), 1, 4096, (4, 1)),
        (Variant(8, 7, 1, 4, 1, 4, 5, 1), 1, 16, (1, 1)),
    ],
)
def test_clusters_come_in_waves(variant, count, n, wanted):
    """132 programs by themselves run at once, but 30 clusters of four and 14 of eight."""
    assert busiest(variant, count, n) == wanted


def test_few_tiles_are_parts_of_k():
    for count in (1, 8, 16, 64):
        assert choose(INT3, count, 14336, 4096).splits == 1
        assert choose(INT3, count, 4096, 14336).splits > 1
    assert choose(INT3, 1, 16, 512).splits == 1


def test_many_rows_are_two_passes_where_few_tiles_would_be_clusters_of_four():
    for count in (65, 96, 97, 128):
        for k in (4096, 14336):
            assert choose(INT3, count, 4096, k) == Variant(64, 8, 1, 2, 2, 1, 4, 1)
        assert choose(INT3, count, 14336, 4096).tokens >= count


def test_tiles_fill_multiprocessors():
    """One program each, or seven slabs by one slab, where that is all of a weight."""
    for count in (8, 16, 32, 33, 64, 65, 128):
        assert choose(INT3, count, 14336, 4096).programs(count, 14336) == 128
    assert choose(INT3, 1, 14336, 4096)[:4] == (8, 1, 1, 8)
