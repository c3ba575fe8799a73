"""The rule of choice of `linear_sparse_int4` against times of an H100: what `validate_linear_sparse_int4.py --tune` found."""

import json
import platform
from collections import defaultdict
from dataclasses import astuple, fields
from pathlib import Path

import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.sparse_linear import tilings
from fast.kernels.sparse_linear.tilings import Tiling, tiling_of
from fast.kernels.sparse_linear.weight_reads import TURN

ROOT = Path(__file__).resolve().parents[4]
GROUP = 128
#: How far from the quickest of the tiles that were tried.
MARGIN = 1.05


def measured():
    """Microseconds by shape and rows of inputs, then by the numbers of tiles; those of before had fewer."""
    found = defaultdict(dict)
    for row in json.loads((ROOT / "reports/data/linear_sparse_int4_tiles.json").read_text())["times"]:
        name = row["name"].removesuffix(" (chosen)")
        numbers = [*map(int, name.split(",")), 0, 0][: len(fields(Tiling))]
        found[*row["shape"], row["rows"]][tuple(numbers)] = row["us"]
    return dict(found)


MEASURED = measured()


@pytest.mark.parametrize("problem", MEASURED, ids=str)
def test_the_choice_is_among_the_quickest(problem):
    rows, length, count = problem
    one, times = tiling_of(rows, length, GROUP, count), MEASURED[problem]
    assert times[tuple(map(int, astuple(one)))] <= MARGIN * min(times.values())


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 16, 17, 32, 64])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("arranged", [None, 1])
def test_choices_are_tiles_that_there_are(count, group, arranged, monkeypatch):
    """Of shapes small and large: powers of two, no more warps than turns, no more at once than a row has."""
    monkeypatch.setattr(tilings, "ARRANGED_FROM", arranged)
    for rows in (1, 16, 500, 2048, 8192, 28672, 128256):
        for length in (256, 768, 4096, 11008, 14336, 28672):
            one = tiling_of(rows, length, group, count)
            assert one.arranged == (arranged is not None)
            assert one.tiles in (1, 2)
            assert {one.sums, one.chunks} <= {1, 2, 4}
            assert one.warps_k in (1, 2, 4, 8, 16)
            assert one.warps_k * TURN.value <= length
            assert one.chunks == 1 or length % (one.warps_k * one.chunks * TURN.value) == 0
            # What a lane holds of sums and of the weight.
            assert one.tiles * one.sums * one.chunks <= 8


def test_reads_of_two_turns(monkeypatch):
    monkeypatch.setattr(tilings, "WIDE_UP_TO", 4)
    assert tiling_of(14336, 4096, 128, 1) == Tiling(2, 1, 4, 2, wide=True)
    assert tiling_of(1024, 4096, 128, 4).chunks == 2
    # Five rows of two parts have more columns than a tile; groups of 32, eight parts; K that 256 does not divide.
    for given in ((4096, 4096, 128, 5), (4096, 4096, 64, 3), (4096, 4096, 32, 1), (4096, 4224, 128, 1)):
        assert not tiling_of(*given).wide


def test_programs_spread_where_there_are_few():
    """The rule of several rows: columns of X, then row tiles, become programs of their own."""
    found = [tiling_of(rows, 4096, GROUP, 16) for rows in (4096, 2048, 1024)]
    assert [(one.tiles, one.sums) for one in found] == [(2, 2), (2, 1), (1, 1)]
