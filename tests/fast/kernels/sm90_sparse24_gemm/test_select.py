"""Which variant a shape gets, and what is launched of it."""

import pytest

from fast.kernels.sm90_sparse24_gemm.host import is_stored, programs_of, steps_of, tiles_of
from fast.kernels.sm90_sparse24_gemm.select import candidates, choose, cycles, terms
from fast.kernels.sm90_sparse24_gemm.variants import Variant


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 128, 129, 5000])
def test_choices_can_be_launched(tokens, promote, bits):
    found = list(candidates(tokens, bits, promote))
    assert choose(tokens, 4096, 14336, bits, promote) in found
    for one in found:
        assert one.cluster <= 8
        # A share of tokens begins where the swizzle does.
        assert one.tokens // one.pair >= 8
        assert one.promote == promote
        # A promoted stage is one panel: 128 elements of 8 bits.
        assert not promote or one.panels == 1


def test_few_tokens_are_split_along_k_and_many_are_not():
    assert choose(16, 4096, 14336, 8, False).splits > 1
    assert choose(8192, 8192, 8192, 8, False)[:2] == (256, 2)
    assert choose(8192, 8192, 8192, 8, False).splits == 1
    assert choose(16, 4096, 14336, 8, False).tokens == 16


def test_the_last_wave_is_full_where_another_tile_fills_it():
    """Without clusters of four, whose shares of 208 and 240 tokens would begin within eight rows of the swizzle."""
    assert choose(13008, 1024, 8192, 16, False).tokens == 208
    assert choose(13008, 4096, 2048, 16, False).tokens == 256
    for one in candidates(13008, 16, False):
        assert one.tokens % (8 * one.pair) == 0
        assert one.tokens % one.chunk == 0
        assert one.splits == 1 or one.tokens <= 128


@pytest.mark.parametrize(
    ("change", "stored"),
    [
        ({}, True), ({"bits": 8}, False), ({"name": "float32"}, False), ({"features": 4100}, False),
        ({"operands": (None, None, None, None, "scale", None)}, False),
        ({"operands": (None, None, None, None, None, "scale")}, False),
        ({"variant": Variant(64, 2, 1, 4, 2, 1)}, False), ({"variant": Variant(128, 2, 1, 4, 2, 2)}, False),
    ],
)  # fmt: skip
def test_what_the_copy_engine_writes(change, stored):
    """Results of 16 bits without scales, whose rows are multiples of 16 bytes, of large tiles."""
    given = {"variant": Variant(256, 2, 1, 5, 2, 1), "bits": 16, "features": 4096, "name": "bfloat16",
             "operands": (None, None, None, "bias", None, None)}  # fmt: skip
    assert is_stored(**(given | change)) == stored


def test_twice_the_work_takes_longer():
    for one in candidates(128, 8, False):
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
    one = Variant(min(tokens, 256), 2, 1, 5, pair, splits)
    assert terms(one, tokens, *shape, 8, 132).waves == waves


def test_programs_cover_the_product():
    split, whole = Variant(16, 1, 2, 4, 1, 4), Variant(128, 2, 1, 4, 2, 1)
    assert tiles_of(split, 17, 65) == 4
    assert programs_of(split, 17, 65, 2) == 16
    assert tiles_of(whole, 129, 257) == 4
    assert (programs_of(whole, 129, 257, 66), programs_of(whole, 129, 257, 3)) == (8, 6)
    assert (steps_of(split, 14336), steps_of(whole, 14337)) == (56, 113)
