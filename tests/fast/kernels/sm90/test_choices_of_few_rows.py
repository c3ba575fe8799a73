"""Which variants products of few rows get (`sm90_w4a16_gemv`, `sm90_intn_small_m`, `sm90_sparse24_w4a16_gemv`): what was
measured to be the quickest, models against times, and that programs fit a multiprocessor."""

import math
from itertools import pairwise, product

import pytest

from ao_lab.config.recipe import named
from fast.kernels.sm90_intn_small_m import host as intn
from fast.kernels.sm90_intn_small_m.host import (
    MOST_ROWS,
    WIDTHS,
    C,
    busiest,
    cost,
    form_of,
    longest,
    placed,
    rate,
    tiles_of,
)
from fast.kernels.sm90_intn_small_m.host import Form as IntnForm
from fast.kernels.sm90_intn_small_m.host import Variant as IntnVariant
from fast.kernels.sm90_intn_small_m.host import fitted as intn_fitted
from fast.kernels.sm90_sparse24_w4a16_gemv import host as sparse
from fast.kernels.sm90_sparse24_w4a16_gemv.host import GATED, TWO, rows_of_tiles
from fast.kernels.sm90_w4a16_gemv.host import Direct, Form, Variant, choose, gains
from fast.kernels.sm90_w4a16_gemv.several import variant_of
from fast.launch.cuda import SHARED, SYSTEM
from tests.support.family_times import measured

# Preshuffled weights


@pytest.mark.parametrize(
    ("rows", "k", "count", "parts", "gated"),
    [
        ((4096, 1024, 1024), 4096, 1, 2, False), ((8192, 1024, 1024), 8192, 2, 1, True), ((14336, 14336), 4096, 1, 1, True),
        ((4096, 4096, 4096), 4096, 1, None, False), ((4096, 1024, 1056), 4096, 1, None, False),
    ],
)  # fmt: skip
def test_several_weights_have_the_variant_of_the_largest(rows, k, count, parts, gated):
    """parts: of K; None where they are launched apart: parts would be of two waves, or programs of two weights."""
    form = Form("int4", 128, True, False, "bfloat16", len(rows))
    one = variant_of(form, count, rows, k)
    assert (one and one.splits) == parts
    assert one in (None, choose(form._replace(weights=1), count, max(rows), k))
    both = form._replace(weights=2, gated=True)
    assert (variant_of(both, count, (rows[0],) * 2, k) is not None) == gated


INT4 = Form("int4", 128, False, False, "bfloat16")
NF4 = Form("nf4", 64, False, False, "bfloat16")
E2M1, MXFP8 = NF4._replace(element="e2m1", group=16), NF4._replace(element="e4m3_mx", group=32)
INT8 = Form("int8", 0, False, False, "bfloat16")
LARGE, SMALL, LEAST = (14336, 4096), (4096, 4096), (1024, 4096)
WAVE, LONG, PAIR = (6144, 4096), (4096, 14336), (28672, 4096)


@pytest.mark.parametrize(
    ("form", "rows", "shape", "gained"),
    [
        (INT4, 8, LARGE, True), (INT4, 9, LARGE, False), (INT4, 8, SMALL, True),
        (INT4, 8, LEAST, True), (INT4, 9, LEAST, False), (INT4._replace(group=32), 3, LARGE, False),
        (INT4._replace(group=64), 8, LARGE, True), (INT4._replace(group=64), 9, LARGE, False),
        (INT4._replace(group=64), 3, PAIR, False), (INT4._replace(group=64, zero=True), 5, LEAST, False),
        (INT8, 8, LARGE, True), (INT8, 9, LARGE, False), (INT8, 2, SMALL, True), (INT8, 3, SMALL, False),
        (INT8, 8, LEAST, True), (INT8, 9, LEAST, False), (INT8._replace(zero=True), 1, LEAST, False),
        (INT8._replace(element="e4m3"), 8, LEAST, True), (INT8, 3, LEAST[::-1], False), (INT8, 1, (2048, 4096), False),
        (INT8, 4, WAVE, True), (INT8, 5, WAVE, False), (INT8, 4, LONG, True), (INT8, 5, LONG, False), (INT8, 16, PAIR, True),
        (INT8._replace(group=128), 1, LARGE, False), (INT8._replace(element="e4m3"), 4, LARGE, True),
        (NF4, 16, LARGE, True), (NF4, 16, SMALL, True), (NF4, 17, LARGE, False),
        (E2M1, 1, SMALL, False), (E2M1, 8, LEAST, True), (E2M1, 9, LEAST, False), (MXFP8, 8, LEAST, True),
        (MXFP8, 8, LARGE, True), (MXFP8, 9, LARGE, False),
        (MXFP8, 4, SMALL, True), (MXFP8, 5, SMALL, False), (MXFP8, 16, PAIR, True), (MXFP8, 4, WAVE, True),
    ],
)  # fmt: skip
def test_rows_that_gain(form, rows, shape, gained):
    assert gains(form, rows, *shape) == gained


@pytest.mark.parametrize(
    ("form", "count", "shape", "chosen"),
    [
        (MXFP8, 1, LARGE, Direct(8, 7, 4, 4)), (INT8, 4, LARGE, Variant(8, 2, 2, 1, 4, 2, True)),
        (MXFP8, 16, PAIR, Direct(16, 14, 2, 4)),
        (INT8, 1, SMALL, Direct(8, 2, 12, 4, True, True)), (INT8, 1, LONG, Direct(8, 2, 12, 4, True, True)),
        (INT8, 2, LONG, Variant(8, 1, 4, 2, 16, 1, True, ahead=True)),
        (MXFP8, 2, LONG, Direct(8, 2, 12, 4)),
        (INT8, 1, WAVE, Direct(8, 3, 5, 6, True, True)), (INT8, 2, WAVE, Variant(8, 1, 4, 1, 8, 2, True)),
        (INT4, 8, LARGE, Variant(8, 2, 2, 1, 4, 2, True)),
        (INT4, 4, SMALL, Variant(8, 1, 3, 2, 6, 2, True)), (INT4, 1, LONG, Direct(8, 2, 14, 2, True, True)),
        (INT4, 2, WAVE, Direct(8, 3, 9, 2, True, True)), (INT4, 3, WAVE, Variant(8, 1, 3, 1, 6, 2, True)),
        (INT4, 1, PAIR, Variant(8, 1, 3, 1, 6, 2, True)),
        (INT4._replace(zero=True), 1, SMALL, Variant(8, 1, 3, 2, 6, 2, True)),
        (INT8, 1, LARGE, Direct(8, 7, 3, 4, True, True)), (INT8, 8, LARGE, Direct(8, 7, 4, 4, True, True)),
        (INT4, 4, LONG, Variant(8, 1, 3, 2, 6, 2, True)), (INT4, 1, LEAST, Direct(8, 1, 24, 4)),
        (INT8, 8, LEAST, Direct(8, 1, 24, 4)), (INT4._replace(zero=True), 1, LEAST, Variant(8, 1, 4, 4, 4, 1, ahead=True)),
        (INT4._replace(group=64), 8, LARGE, Variant(8, 2, 2, 1, 8, 1, True, ahead=True)),
    ],
)  # fmt: skip
def test_programs_leave_room_or_ask_ahead(form, count, shape, chosen):
    """Two to a multiprocessor, or alone and their weight asked for before the kernel in front ends, or straight from memory."""
    assert choose(form, count, *shape) == chosen


@pytest.mark.parametrize(
    ("shape", "blocks", "splits"),
    [
        (LARGE, 2, 1), ((4096, 14336), 1, 2), (SMALL, 1, 2), ((2048, 4096), 1, 2), ((1024, 4096), 1, 4),
        ((128256, 4096), 4, 1),
    ],
)  # fmt: skip
def test_programs_of_nf4_run_at_once(shape, blocks, splits):
    """One a multiprocessor, tall where there are more blocks than those; of clusters of four 30 run at once. x by its rows."""
    for count, streamed in ((1, False), (2, False), (3, True), (16, True)):
        one = choose(NF4, count, *shape)
        assert (one.blocks, one.splits, one.at_once, one.streamed) == (blocks, splits, 1, streamed)
        assert (one.tokens, one.tabled, one.blocks * one.phases) == (8 if count <= 8 else 16, 4, 4)


SERVED = [
    ("int4", 128), ("int4", 32), ("int8", 0), ("e4m3", 128), ("nf4", 64), ("e2m1", 16), ("e2m1", 32), ("e4m3_mx", 32),
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize("scheme", SERVED)
@pytest.mark.parametrize("shape", [(14336, 4096), (4096, 14336), (1024, 4096), (128, 128)])
def test_programs_fit_a_multiprocessor(count, scheme, shape):
    form, steps = Form(*scheme, scheme[0] in ("int4", "int8"), False, "bfloat16"), shape[1] // 128
    one = choose(form, count, *shape)
    assert one is not None or not gains(form, count, *shape)
    if isinstance(one, Direct):
        assert one.takes(form, count, *shape)
    elif one is not None:
        assert one.stages % one.phases == 0
        assert one.at_once * (one.shared(form, count, steps) + SYSTEM) <= SHARED


def test_what_goes_straight_from_memory():
    form, one = Form("int8", 0, False, False, "bfloat16"), Direct(8, 7, 4, 4)
    assert one.takes(form, 8, 14336, 4096)
    assert not one.takes(form, 9, 14336, 4096)
    assert not one.takes(form, 8, 4096, 4096)
    assert not one.takes(form, 8, 14336, 14336)
    assert not one.takes(form, 1, 14336, 128)
    assert not one.takes(form._replace(group=128), 8, 14336, 4096)
    assert one.takes(form._replace(element="e4m3_mx", group=32), 8, 14336, 4096)
    assert not one.takes(form._replace(element="int4"), 8, 14336, 4096)
    assert one.programs(14336) == 128
    assert one.threads == 896


# Packed integers

INT3 = IntnForm(3, 32, False, True, False)


def form_named(scheme, length):
    return form_of(named(scheme), (16, length), 1, True)


def test_the_model_tells_times():
    """Those of chosen variants within 11 percent, in groups of 32 without zero points; in the mean within 2."""
    errors = {}
    for (scheme, *shape, rows, _), times in measured("sm90_intn_small_m").items():
        if not scheme.endswith("_g32"):
            continue
        form, count = form_named(scheme, shape[1]), int(rows)
        one = intn.choose(form, count, *shape)
        rates = next(rates for tile, rates in tiles_of(count) if is_tile(one, tile))
        us = times[",".join(map(str, one))]
        errors[scheme, *shape, count] = cost(one, rates, form, count, *shape) / 1e3 / us - 1
    assert {at: each for at, each in errors.items() if abs(each) > 0.11} == {}
    assert math.fsum(map(abs, errors.values())) / len(errors) < 0.02


def is_tile(one, tile):
    """Whether a variant is a tile in its place: parts of K, stages, steps and programs at once are those of the product."""
    return one[:4] == tile[:4]


#: By the most rows of x: tiles and their rates.
TILES = [(row["when"]["rows"][1], dict(tiles_of(row["when"]["rows"][1]))) for row in C.tiles]


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
        (IntnVariant(64, 8, 1, 2, 2, 1, 4, 1), 128, 4096, (1, 1)),
        (IntnVariant(128, 8, 1, 2, 4, 1, 3, 1), 128, 4096, (2, 2)),
        (IntnVariant(64, 4, 2, 1, 8, 1, 3, 2), 64, 4096, (3, 2)),
        (IntnVariant(8, 1, 1, 8, 1, 4, 4, 4), 1, 14336, (7, 2)),
        (IntnVariant(8, 1, 1, 8, 2, 4, 4, 4), 1, 4096, (4, 1)),
        (IntnVariant(8, 7, 1, 4, 1, 4, 5, 1), 1, 16, (1, 1)),
    ],
)
def test_clusters_come_in_waves(variant, count, n, wanted):
    """132 programs by themselves run at once, but 30 clusters of four and 14 of eight."""
    assert busiest(variant, count, n) == wanted


def test_few_tiles_are_parts_of_k():
    for count in (1, 8, 16, 64):
        assert intn.choose(INT3, count, 14336, 4096).splits == 1
        assert intn.choose(INT3, count, 4096, 14336).splits > 1
    assert intn.choose(INT3, 1, 16, 512).splits == 1


def test_many_rows_are_two_passes_where_few_tiles_would_be_clusters_of_four():
    for count in (65, 96, 97, 128):
        for k in (4096, 14336):
            assert intn.choose(INT3, count, 4096, k) == IntnVariant(64, 8, 1, 2, 2, 1, 4, 1)
        assert intn.choose(INT3, count, 14336, 4096).tokens >= count


def test_tiles_fill_multiprocessors():
    """One program each, or seven slabs by one slab, where that is all of a weight."""
    for count in (8, 16, 32, 33, 64, 65, 128):
        assert intn.choose(INT3, count, 14336, 4096).programs(count, 14336) == 128
    assert intn.choose(INT3, 1, 14336, 4096)[:4] == (8, 1, 1, 8)


INTN_SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (37, 128), (256, 384))
COUNTS = (1, 2, 3, 8, 9, 16, 32, 33, 64, 65, 128)


@pytest.mark.parametrize("shape", INTN_SHAPES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_tiles_of_integers_fit_a_multiprocessor(bits, shape):
    for count, group, zero in product(COUNTS, (32, 64, 128), (False, True)):
        form = IntnForm(bits, group, zero, True, False)
        one = intn.choose(form, count, *shape)
        assert one is not None
        assert one.takes(form, shape[1])
        assert one.programs(count, shape[0]) * one.tokens * one.rows >= count * shape[0] * one.splits
        assert one.rows % one.splits == 0
        assert one.at_once * (one.shared(form, shape[1]) + SYSTEM) <= SHARED
        assert one.threads * one.at_once <= 2048


@pytest.mark.parametrize("shape", INTN_SHAPES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_every_tile_has_a_place(bits, shape):
    """In any shape, also those tiles that are not chosen there."""
    for _, tiles in TILES:
        for tile, group in product(tiles, (32, 64, 128)):
            form = IntnForm(bits, group, False, True, False)
            one = placed(tile, form, 128, *shape)
            assert one is not None
            assert one.takes(form, shape[1])


def test_long_rows_of_zero_points_have_no_room():
    form = IntnForm(6, 32, True, True, False)
    assert intn.choose(form, 128, 4096, 1 << 20) is None
    assert intn_fitted(form, IntnVariant(8, 2, 1, 4, 1, 4, 9, 3), 4096).stages < 9
    assert longest(IntnForm(3, 384, False, True, False), 3072, 4) == 1


# 2:4 weights

SPARSE_SHAPES = (
    (14336, 4096),
    (4096, 14336),
    (4096, 4096),
    (1024, 4096),
    (128256, 4096),
    (100, 256),
    (4096, 11008),
)
SPARSE_INT4 = sparse.Form(128, False, False)


@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_sparse_programs_fit_a_multiprocessor(count, group):
    for shape, narrow in product(SPARSE_SHAPES, (False, True)):
        form = sparse.Form(group, narrow, False)
        one = sparse.choose(form, count, *shape)
        # A row's scales are four bytes at least: one bfloat16 for 256 columns takes stages of 512, which are too many
        # registers for 16 rows.
        if one is None:
            assert (group, narrow) == (256, True)
            continue
        assert one.programs(shape[0]) * one.tiles * 16 // one.splits >= shape[0]
        assert one.phases * one.splits * one.columns >= shape[1]
        assert one.at_once * (one.shared(form) + SYSTEM) <= SHARED
        assert one.threads * one.at_once <= 2048
        assert one.tokens >= count


@pytest.mark.parametrize(
    ("shape", "count", "chosen"),
    [
        ((14336, 4096), 1, (8, 512, 4, 2, 7, 2, True, 2)),
        ((14336, 4096), 16, (16, 512, 4, 2, 7, 2, True, 2)),
        ((28672, 4096), 1, (8, 512, 4, 2, 14, 2, True, 2)),
        ((28672, 4096), 16, (16, 512, 8, 1, 14, 1, True, 2)),
        ((6144, 4096), 8, (8, 512, 4, 2, 3, 2, True, 2)),
        ((6144, 4096), 16, (16, 512, 4, 2, 3, 2, True, 2)),
        ((4096, 14336), 4, (8, 512, 7, 4, 9, 1, True, 2)),
        ((4096, 14336), 16, (16, 512, 7, 4, 9, 1, True, 2)),
        ((4096, 4096), 2, (8, 512, 4, 2, 4, 1, True, 2)),
        ((4096, 4096), 16, (16, 512, 4, 2, 4, 1, True, 2)),
        ((1024, 4096), 8, (8, 512, 8, 1, 1, 2, True, 1)),
        ((1024, 4096), 16, (16, 512, 4, 2, 1, 1, True, 1)),
        ((128256, 4096), 1, (8, 512, 8, 1, 2, 2, True, 2)),
        ((151936, 1024), 1, (8, 512, 2, 1, 2, 2, True, 2)),
        ((14336, 4096), 17, (24, 256, 8, 2, 7, 1, True, 2)),
        ((4096, 14336), 24, (24, 256, 7, 8, 10, 1, True, 2)),
        ((4096, 4096), 20, (24, 256, 8, 2, 4, 1, True, 2)),
        ((14336, 4096), 32, (16, 512, 8, 1, 14, 1, True, 2, 2)),
        ((4096, 14336), 48, (16, 512, 7, 4, 13, 1, True, 2, 3)),
    ],
)
def test_layers_of_a_model_have_what_was_measured_to_be_fastest(shape, count, chosen):
    assert sparse.choose(SPARSE_INT4, count, *shape) == sparse.Variant(*chosen)


def test_what_no_variant_divides():
    assert sparse.choose(SPARSE_INT4, 1, 64, 384) is None
    assert sparse.choose(SPARSE_INT4, 16, 8192, 28672) is None
    assert sparse.fitted(sparse.Form(256, True, False), 8, 256, 1, 1, 256) is None
    assert sparse.fitted(SPARSE_INT4, 8, 256, 1, 20, 4096) is None
    assert sparse.fitted(SPARSE_INT4, 8, 256, 1, 1, 8192) is None


@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize(("rows", "k"), [((14336, 14336), 4096), ((1024, 1024), 4096), ((20, 20), 512)])
def test_tiles_of_a_gate_and_of_what_it_gates_are_pairs(rows, k, count):
    for half in (False, True):
        one = sparse.choose(sparse.Form(64, False, half, GATED), count, rows_of_tiles(*rows), k)
        assert one.tiles % 2 == 0
        assert (one.tiles * 4 // one.splits) % 2 == 0
    assert sparse.fitted(sparse.Form(64, False, False, GATED), 8, 512, 1, 3, 4096) is None
    assert sparse.fitted(sparse.Form(64, False, False, TWO), 8, 512, 1, 3, 4096) is not None


def test_a_gate_has_the_variant_that_was_measured_for_as_many_rows():
    for count in (1, 8, 16):
        alone = sparse.choose(sparse.Form(64, False, False), count, 28672, 4096)
        for products in (TWO, GATED):
            assert (
                sparse.choose(
                    sparse.Form(64, False, False, products), count, rows_of_tiles(14336, 14336), 4096
                )
                == alone
            )
