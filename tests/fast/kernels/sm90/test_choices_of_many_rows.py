"""Which variants products of many rows get (`sm90_w4a16_gemm`, `sm90_s8_gemm`, `sm90_sparse24_gemm`): models against times,
and what is launched of them."""

import pytest

from fast.cost import first_row
from fast.kernels.sm90_s8_gemm import host as s8
from fast.kernels.sm90_s8_gemm.host import fitted as s8_fitted
from fast.kernels.sm90_sparse24_gemm import host as sparse
from fast.kernels.sm90_sparse24_gemm.host import Variant as SparseVariant
from fast.kernels.sm90_sparse24_gemm.host import cycles, is_stored, steps_of, terms, tiles_of
from fast.kernels.sm90_sparse24_gemm.host import programs_of as sparse_programs_of
from fast.kernels.sm90_w4a16_gemm import host
from fast.kernels.sm90_w4a16_gemm.host import (
    C,
    Variant,
    Weight,
    candidates,
    choose,
    fitted,
    grid_of,
    nanoseconds,
    ratio_of,
    scheduled,
    small_m_step,
    stage,
)

# Preshuffled weights

#: What stages were timed of.
WEIGHTS = [
    *(Weight("int4", zero, parts) for zero in (False, True) for parts in (1, 2)), Weight("int8"), Weight("e4m3"),
    *(Weight("e2m1", False, parts) for parts in (2, 4)), Weight("e4m3_mx", False, 2), Weight("nf4"),
]  # fmt: skip
INT4 = Weight("int4")
UP, DOWN = (14336, 4096), (4096, 14336)
#: Microseconds of variants (tokens, pair, splits) on an H100, int4 in groups of 128.
TIMES = {
    (UP, 160): {(192, 1, 1): 41.3, (192, 2, 1): 41.6, (192, 1, 2): 52.3, (192, 2, 2): 52.9, (128, 2, 1): 65.6},
    (UP, 256): {(256, 1, 1): 45.9, (256, 2, 1): 47.2, (256, 1, 2): 59.4, (256, 2, 2): 60.0, (128, 1, 1): 63.3},
    (UP, 512): {(256, 1, 1): 89.4, (256, 2, 1): 90.5, (192, 1, 1): 117.2, (192, 2, 1): 117.2, (256, 2, 2): 120.2},
    (UP, 1024): {(256, 1, 1): 179.7, (256, 2, 1): 181.0, (128, 1, 1): 217.9, (256, 1, 2): 218.4, (128, 2, 1): 219.6},
    (UP, 2048): {(256, 2, 1): 316.7, (256, 1, 1): 321.0, (192, 2, 1): 393.8, (192, 1, 1): 393.9, (256, 1, 2): 418.2},
    (UP, 8192): {(256, 2, 1): 1269.4, (256, 1, 1): 1291.2, (192, 2, 1): 1438.2, (192, 1, 1): 1470.5},
    (DOWN, 256): {(128, 1, 2): 60.5, (192, 1, 2): 72.3, (256, 2, 2): 75.8, (256, 1, 2): 77.2, (256, 2, 4): 95.0},
    (DOWN, 512): {(256, 1, 2): 86.3, (128, 1, 1): 109.0, (128, 2, 1): 110.2, (128, 1, 2): 118.4, (192, 1, 1): 126.2},
    (DOWN, 1024): {(256, 1, 1): 157.6, (256, 2, 1): 158.1, (256, 1, 2): 176.7, (128, 1, 1): 229.2},
    (DOWN, 2048): {(256, 1, 1): 318.3, (256, 2, 1): 319.6, (256, 1, 2): 360.9, (256, 2, 2): 435.0},
}  # fmt: skip


@pytest.mark.parametrize("case", TIMES)
def test_the_model_orders_what_was_timed(case):
    """What it takes of the timed variants is at most 2% slower than the quickest, and times are within 20%."""
    (features, length), tokens = case
    times = TIMES[case]
    predicted = {one: nanoseconds(Variant(*one, 5), tokens, features, length, INT4) / 1e3 for one in times}
    assert times[min(predicted, key=predicted.__getitem__)] <= 1.02 * min(times.values())
    assert all(0.8 < predicted[one] / us < 1.2 for one, us in times.items()), predicted


QKV = (6144, 4096)
MXFP8, MXFP4, NVFP4 = Weight("e4m3_mx", False, 2), Weight("e2m1", False, 2), Weight("e2m1", False, 4)
#: Microseconds on an H100 of tiles of 256 tokens alone, and with small ones of 64, 128 and 192.
CUT = {
    (INT4, UP, 512): (92.4, 93.7, 93.7, 96.2), (INT4, UP, 1024): (191.6, 193.9, 180.8, 186.9),
    (INT4, UP, 2048): (361.7, 365.3, 367.7, 377.0), (INT4, UP, 8192): (1425.7, 1444.2, 1444.6, 1496.0),
    (INT4, QKV, 1024): (92.9, 94.2, 82.6, 90.9), (INT4, DOWN, 1024): (168.5, 170.5, 170.9, 176.4),
    (MXFP8, UP, 1024): (181.9, 181.7, 169.0, 165.8), (MXFP8, UP, 8192): (1487.6, 1466.0, 1474.1, 1456.3),
    (MXFP8, QKV, 1024): (90.9, 91.5, 78.8, 82.9), (MXFP8, DOWN, 1024): (164.4, 163.8, 162.8, 164.1),
    (MXFP4, UP, 1024): (189.2, 189.7, 174.0, 171.3), (MXFP4, UP, 8192): (1394.9, 1368.8, 1378.3, 1362.7),
    (MXFP4, QKV, 1024): (89.6, 90.1, 75.8, 81.5), (NVFP4, UP, 1024): (198.6, 199.8, 185.9, 187.1),
    (NVFP4, QKV, 1024): (97.6, 97.5, 86.8, 92.8), (NVFP4, UP, 2048): (368.7, 368.1, 367.1, 371.7),
}  # fmt: skip


@pytest.mark.parametrize("case", CUT)
def test_small_tiles_are_taken_where_they_were_faster(case):
    """What is taken of them is at most 2% slower than the quickest, and never slower than whole tiles alone."""
    weight, (features, length), tokens = case
    times = dict(zip((0, 64, 128, 192), CUT[case], strict=True))
    predicted = {
        small: nanoseconds(Variant(256, 1, 1, 5, small), tokens, features, length, weight) for small in times
    }
    taken = min(predicted, key=predicted.__getitem__)
    assert times[taken] <= min(1.02 * min(times.values()), times[0])


@pytest.mark.parametrize("weight", WEIGHTS)
def test_stages(weight):
    """Larger tiles take longer, but less for each token; between what was timed is a line."""
    times = [stage(tokens, weight) for tokens in (64, 96, 128, 160, 192, 224, 256)]
    assert times == sorted(times)
    assert [us / at for at, us in enumerate(times, 2)] == sorted(
        (us / at for at, us in enumerate(times, 2)), reverse=True
    )
    assert 2 * times[1] == times[0] + times[2]


def test_stages_that_were_not_timed():
    """The element without zero points, then without groups; there is no row besides those that were."""
    assert {id(first_row(C.stages, **weight._asdict())) for weight in WEIGHTS} == set(map(id, C.stages))
    assert stage(64, Weight("int8", True, 2)) == stage(64, Weight("int8"))
    assert stage(64, Weight("e4m3", False, 2)) == stage(64, Weight("e4m3"))
    assert stage(64, Weight("int4", True, 2)) != stage(64, Weight("int4", False, 2))


def test_names_and_boxes():
    """A box divides what programs share of a small tile."""
    one = fitted(256, 1, 1, INT4, 192)
    assert (one.name, one.box, one.chunk) == ("t256+192c1k1s5", 64, 32)
    assert fitted(256, 2, 1, INT4).box == 64
    assert [fitted(160, pair, 1, INT4, small).box for pair, small in ((1, 0), (2, 0), (1, 64))] == [
        64,
        64,
        64,
    ]
    assert Variant(48, 1, 1, 3, 16).chunk == 16


@pytest.mark.parametrize(
    ("shape", "tokens", "wanted"),
    [
        (UP, 129, (160, 1, 1)), (UP, 256, (256, 1, 1)), (UP, 1024, (256, 1, 1)), (UP, 8192, (256, 1, 1)),
        (DOWN, 512, (256, 1, 2)), (DOWN, 1024, (256, 1, 1)),
    ],
)  # fmt: skip
def test_choices(shape, tokens, wanted):
    assert choose(tokens, *shape, INT4)[:3] == wanted


def test_candidates_are_possible():
    """Parts of K have at least one pair of stages, tiles are no larger than needed."""
    assert {one.splits for one in candidates(300, 128, INT4)} == {1}
    assert {one.tokens for one in candidates(130, 4096, INT4)} == {128, 160}
    assert {one.tokens for one in candidates(128, 4096, INT4)} == {64, 96, 128}
    assert {one.tokens for one in candidates(33, 4096, INT4)} == {64}


@pytest.mark.parametrize(
    ("tokens", "weight", "wanted"),
    [(64, INT4, "t64c1k1s12u2"), (65, INT4, "t96c1k1s10u2"), (128, INT4, "t128c1k1s10"), (128, MXFP4, "t128c1k1s8u2"),
     (128, Weight("int8"), "t128c1k1s6u2"), (129, MXFP4, "t160c1k1s8")],
)  # fmt: skip
def test_few_rows(tokens, weight, wanted):
    """Tiles of what there is, by warpgroups that split K where that was faster."""
    assert choose(tokens, *UP, weight).name == wanted


def test_slices_of_k_have_no_neighbours():
    """And as many stages each, of few rows alone."""
    for tokens in (33, 96, 128, 129, 1000):
        for weight in WEIGHTS:
            for one in candidates(tokens, 4096, weight):
                assert one.k_slices == 1 or (one.cluster == 1 and not one.small and one.stages % 2 == 0)
                assert one.k_slices == 1 or (tokens <= 128 and one.threads == 640)


#: Microseconds of stages on an H200, (time - 3) / 64, of (14336, 4096): by tokens of tiles with slices of K, and of 128.
SLICED = {
    INT4: {64: 0.364, 96: 0.40}, Weight("int4", True): {64: 0.385}, Weight("int4", False, 2): {64: 0.367},
    Weight("int8"): {64: 0.388, 96: 0.44, 128: 0.50}, Weight("e4m3"): {64: 0.361, 96: 0.413, 128: 0.472},
    MXFP4: {64: 0.308, 128: 0.403},
}  # fmt: skip


@pytest.mark.parametrize("weight", SLICED)
def test_stages_of_slices(weight):
    """The model of few rows is within 8 percent."""
    for tokens, us in SLICED[weight].items():
        one = fitted(tokens, 1, 1, weight, k_slices=2)
        assert small_m_step(one, weight) == pytest.approx(us, rel=0.08)


def test_programs():
    """Those that persist are at most what runs at once; with splits there is a cluster for each tile."""
    assert programs(Variant(256, 2, 1, 5), 1024, 14336, 66) == 132
    assert programs(Variant(256, 1, 1, 5), 256, 4096, 132) == 32
    assert programs(Variant(128, 1, 3, 5), 160, 4096, 30) == 2 * 32 * 3
    assert programs(Variant(256, 2, 1, 5), 200, 384, 66) == 4
    assert programs(Variant(256, 1, 1, 5, 128), 300, 256, 132) == 6


def programs(one, tokens, features, at_once):
    grid = grid_of(one, tokens, features, at_once)
    return host.programs_of(one, grid, scheduled(grid, ratio_of(one, INT4)))


# Codes of int8


@pytest.mark.parametrize(
    ("tokens", "features", "wanted"),
    [
        (255, 14336, None), (256, 14336, 256), (257, 14336, 128), (1024, 14336, 256), (8192, 14336, 256), (512, 14336, 256),
        (256, 4096, None), (512, 4096, 128), (1024, 4096, 256), (8192, 4096, 256), (300, 4096, 128),
        (512, 6144, 256), (1024, 6144, 128), (8192, 6144, 256), (512, 1024, None), (8192, 1024, 256), (8192, 8, 128),
        (2048, 8, None),
    ],
)  # fmt: skip
def test_choices_of_codes(tokens, features, wanted):
    """At least seven tenths of the multiprocessors have a tile; narrow ones where they take fewer rounds by their time."""
    for stored in (True, False):
        made = s8.choose(tokens, features, stored)
        assert made == (None if wanted is None else s8_fitted(wanted, s8.C.pair, stored))


def test_names_of_codes():
    assert (s8_fitted(256, 2, True).name, s8_fitted(128, 1, False).name) == ("t256c2s4d2", "t128c1s6d2w")


def test_programs_of_codes():
    """Whole clusters."""
    assert (s8.programs_of(256, 257, 8), s8.programs_of(256, 257, 264), s8.programs_of(128, 257, 264, 1)) == (
        4,
        8,
        9,
    )


# 2:4 weights


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 128, 129, 5000])
def test_choices_can_be_launched(tokens, promote, bits):
    found = list(sparse.candidates(tokens, bits, promote))
    assert sparse.choose(tokens, 4096, 14336, bits, promote) in found
    for one in found:
        assert one.cluster <= 8
        # A share of tokens begins where the swizzle does.
        assert one.tokens // one.pair >= 8
        assert one.promote == promote
        # A promoted stage is one panel: 128 elements of 8 bits.
        assert not promote or one.panels == 1


def test_few_tokens_are_split_along_k_and_many_are_not():
    assert sparse.choose(16, 4096, 14336, 8, False).splits > 1
    assert sparse.choose(8192, 8192, 8192, 8, False)[:2] == (256, 2)
    assert sparse.choose(8192, 8192, 8192, 8, False).splits == 1
    assert sparse.choose(16, 4096, 14336, 8, False).tokens == 16


def test_the_last_wave_is_full_where_another_tile_fills_it():
    """Without clusters of four, whose shares of 208 and 240 tokens would begin within eight rows of the swizzle."""
    assert sparse.choose(13008, 1024, 8192, 16, False).tokens == 208
    assert sparse.choose(13008, 4096, 2048, 16, False).tokens == 256
    for one in sparse.candidates(13008, 16, False):
        assert one.tokens % (8 * one.pair) == 0
        assert one.tokens % one.chunk == 0
        assert one.splits == 1 or one.tokens <= 128


@pytest.mark.parametrize(
    ("change", "stored"),
    [
        ({}, True), ({"bits": 8}, False), ({"name": "float32"}, False), ({"features": 4100}, False),
        ({"scaled": True}, False),
        ({"variant": SparseVariant(64, 2, 1, 4, 2, 1)}, False), ({"variant": SparseVariant(128, 2, 1, 4, 2, 2)}, False),
    ],
)  # fmt: skip
def test_what_the_copy_engine_writes(change, stored):
    """Results of 16 bits without scales, whose rows are multiples of 16 bytes, of large tiles."""
    given = {"variant": SparseVariant(256, 2, 1, 5, 2, 1), "bits": 16, "features": 4096, "name": "bfloat16",
             "scaled": False}  # fmt: skip
    assert is_stored(**(given | change)) == stored


def test_twice_the_work_takes_longer():
    for one in sparse.candidates(128, 8, False):
        assert cycles(one, 128, 8192, 14336, 8, 132) < cycles(one, 128, 16384, 28672, 8, 132)


@pytest.mark.parametrize(
    ("tokens", "shape", "pair", "splits", "waves"),
    [
        (2048, (4096, 14336), 2, 1, 2),
        (2048, (4096, 14336), 4, 1, 3),
        (8192, (14336, 4096), 4, 1, 30),
        (128, (4096, 14336), 2, 4, 2),
    ],
)
def test_groups_of_multiprocessors_leave_some_idle(tokens, shape, pair, splits, waves):
    """30 clusters of four and 14 of eight are at work at once, not 33 and 16."""
    one = SparseVariant(min(tokens, 256), 2, 1, 5, pair, splits)
    assert terms(one, tokens, *shape, 8, 132).waves == waves


def test_programs_cover_the_product():
    split, whole = SparseVariant(16, 1, 2, 4, 1, 4), SparseVariant(128, 2, 1, 4, 2, 1)
    assert tiles_of(split, 17, 65) == 4
    assert sparse_programs_of(split, 17, 65, 2) == 16
    assert tiles_of(whole, 129, 257) == 4
    assert (sparse_programs_of(whole, 129, 257, 66), sparse_programs_of(whole, 129, 257, 3)) == (8, 6)
    assert (steps_of(split, 14336), steps_of(whole, 14337)) == (56, 113)
