"""The rule of choice of `linear_sparse_int4` against times: of an H100 for inputs in place, and of an H200 for all that
the rule chooses among (`tests/gpu/validate.py triton_mma_sparse_small_m --part times`)."""

import platform
from dataclasses import astuple

import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.triton_sparse24_small_m.host import (
    Tiling,
    arranged_bound,
    in_place,
    tiling_of,
    weight_bound,
    widened,
)
from fast.kernels.triton_sparse24_small_m.weight_reads import TURN
from tests.support.family_times import measured

GROUP = 128
#: How far from the quickest of the tiles that were tried.
MARGIN = 1.05


IN_PLACE = measured("triton_sparse24_small_m", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("problem", IN_PLACE, ids=str)
def test_the_choice_is_among_the_quickest(problem):
    _, rows, length, count, _ = problem
    one, times = in_place(rows, length, GROUP, int(count)), IN_PLACE[problem]
    assert times[",".join(str(int(field)) for field in astuple(one))] <= MARGIN * min(times.values())


def test_what_was_not_timed_is_read_in_place():
    """Small groups, and more rows."""
    for given in ((14336, 4096, 64, 1), (14336, 4096, 32, 8), (14336, 4096, 128, 17)):
        assert tiling_of(*given) == in_place(*given)
    timed = measured("triton_sparse24_small_m")
    assert len(timed) == 20
    assert {rows for _, _, _, rows, _ in timed} == {"1", "2", "4", "8", "16"}


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 16, 17, 32, 64])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("rule", [tiling_of, in_place, arranged_bound])
def test_choices_are_tiles_that_there_are(count, group, rule):
    """Of shapes small and large: powers of two, no more warps than turns, no more at once than a row has."""
    for rows in (1, 16, 500, 2048, 8192, 28672, 128256):
        for length in (256, 768, 4096, 11008, 14336, 28672):
            one = rule(rows, length, group, count)
            assert rule is tiling_of or one.arranged == (rule is arranged_bound)
            assert one.tiles in (1, 2)
            assert {one.sums, one.chunks} <= {1, 2, 4}
            assert one.warps_k in (1, 2, 4, 8, 16)
            assert one.warps_k * TURN.value <= length
            assert one.chunks == 1 or length % (one.warps_k * one.chunks * TURN.value) == 0
            # What a lane holds of sums and of the weight.
            assert one.tiles * one.sums * one.chunks <= 8


def test_reads_of_two_turns():
    assert tiling_of(14336, 4096, 128, 1) == Tiling(2, 1, 4, 2, wide=True)
    small = weight_bound(1024, 4096, 128, 4)
    assert (small.chunks, widened(small, 4096, 128, 4).chunks) == (1, 2)
    # Five rows of two parts have more columns than a tile; groups of 32, eight parts; K that 256 does not divide.
    for given in ((4096, 4096, 128, 5), (4096, 4096, 64, 3), (4096, 4096, 32, 1), (4096, 4224, 128, 1)):
        assert widened(weight_bound(*given), *given[1:]) is None


def test_programs_spread_where_there_are_few():
    """The rule of several rows: columns of X, then row tiles, become programs of their own."""
    found = [in_place(rows, 4096, GROUP, 16) for rows in (4096, 2048, 1024)]
    assert [(one.tiles, one.sums) for one in found] == [(2, 2), (2, 1), (1, 1)]
    # Where X is arranged, only programs that would be on few multiprocessors.
    found = [arranged_bound(rows, 4096, GROUP, 16) for rows in (14336, 2048, 1024)]
    assert [(one.tiles, one.sums) for one in found] == [(2, 2), (1, 2), (1, 1)]
