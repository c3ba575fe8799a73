"""Rows sorted by expert in the emulator, bit for bit: whose weight a row has, and where its tiles end; the rule of variants."""

import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_w4a16_gemm.experts import (
    candidates,
    divisions,
    longest,
    most_tiles,
    nanoseconds,
    tiles_of,
)
from fast.kernels.sm90_w4a16_gemm.host import Variant
from fast.kernels.triton_small_m.grouped import stacked
from tests.emulator.device.memory import POISON
from tests.emulator.faults import assert_seen, at_night, every_second
from tests.fast.kernels.sm90.products import require_nvrtc, w4a16_gemm_of_experts
from tests.fast.kernels.sm90.test_w4a16_gemm import expected, stored
from tests.gpu.linear.weights import decoded
from tests.support.family_times import measured

BF16, F16 = torch.bfloat16, torch.float16
PLAIN, TWO_SIZES = Variant(32, 1, 1, 3, grouped=True), Variant(48, 1, 1, 3, 16, grouped=True)
#: Variant; scheme; rows of each expert; features and columns; dtype of x.
CASES = {
    "int4": (PLAIN, "int4_g128", (33, 0, 32, 5), (256, 256), BF16),
    "two sizes": (TWO_SIZES, "int4_g64", (49, 16, 0, 65, 1), (128, 256), BF16),
    "int4 with zero points": (TWO_SIZES, "int4_g32_asymmetric", (7, 60), (256, 256), F16),
    "int8 with zero points": (PLAIN, "int8_rowwise_asymmetric", (0, 9, 40), (128, 256), BF16),
    "e4m3": (PLAIN, "fp8_rowwise", (31, 2), (128, 256), F16),
    "mxfp4": (TWO_SIZES, "mxfp4", (20, 0, 0, 50), (128, 256), BF16),
    "nvfp4": (PLAIN, "nvfp4", (40, 3, 17), (128, 256), BF16),
    "mxfp8": (PLAIN, "mxfp8_e4m3", (1, 35), (256, 128), BF16),
}


def experts_of(scheme, count, n, k):
    """Weights of experts, and what they stand for."""
    made = [stored(scheme, n, k, seed) for seed in range(count)]
    return stacked([w for w, _ in made]), [dense for _, dense in made]


def rows_of(counts, k, dtype, more=0):
    """Rows with one 1 each, more than experts have, and where they end."""
    draw, total = torch.Generator().manual_seed(0), sum(counts) + more
    x = torch.zeros(total, k, dtype=dtype)
    x[torch.arange(total), torch.randint(0, k, (total,), generator=draw)] = 1
    return x, torch.tensor(counts).cumsum(0).to(torch.int32)


def by_expert(x, ends, dense):
    """The exact rows of those that belong to an expert."""
    bounds = [0, *ends.tolist()]
    return torch.cat([expected(x[a:b], w, None) for a, b, w in zip(bounds, bounds[1:], dense, strict=False)])


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", at_night(CASES, "int4 with zero points", "e4m3", "mxfp8"))
def test_a_row_has_the_weight_of_its_expert(name, early):
    require_nvrtc()
    variant, scheme, counts, (n, k), dtype = CASES[name]
    w, dense = experts_of(scheme, len(counts), n, k)
    x, ends = rows_of(counts, k, dtype, more=3)
    found = w4a16_gemm_of_experts(x, w, ends, variant, early=early, seed=1)
    assert_same_bits(found[: sum(counts)], by_expert(x, ends, dense))
    assert (found[sum(counts) :].view(torch.uint8) == POISON).all()


@pytest.mark.parametrize(
    ("ends", "owners"),
    [
        ((10, 500, 700), (10, 70, 70)),  # behind all rows
        ((40, 20, 70), (40, 40, 70)),  # not in order: nobody's rows are another's
        ((0, 0, 0), (0, 0, 0)),
    ],
)
def test_ends_that_are_none_write_no_row_twice(ends, owners):
    require_nvrtc()
    w, dense = experts_of("int4_g128", 3, 128, 256)
    x, right = rows_of((70,), 256, BF16)[0], torch.tensor(owners)
    found = w4a16_gemm_of_experts(x, w, torch.tensor(ends, dtype=torch.int32), PLAIN, early=True)
    assert_same_bits(found[: owners[-1]], by_expert(x, right, dense))
    assert (found[owners[-1] :].view(torch.uint8) == POISON).all()


#: A fault of the kernel, and what is changed.
FAULTS = {
    "a tile writes rows of the next expert": ("if (limit - token < COUNT) return write_rows", "if (false) return write_rows"),
    "words of another expert": ("p.words + index() * p.words_each", "p.words"),
    "scales of another expert": ("p.scales + index() * p.scales_each", "p.scales"),
    "a row too many": ("if (row + 1 < limit)", "if (row < limit)"),
    "a large tile is taken for a small one": ("left <= SMALL", "left <= TOKENS"),
    "small tiles are left out": ("(SMALL < TOKENS ? 2 : 1) * p.experts", "p.experts"),
    "a small tile begins where the expert's rows do": ("small ? (last - first) / TOKENS : 0", "0"),
    "the last expert is left out": ("index() ? last : 0;", "index() ? last : 0; if (index() == p.experts - 1) return false;"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_the_emulator_sees_faults(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    w, dense = experts_of("int4_g128", 3, 128, 256)
    x, ends = rows_of((5, 63, 29), 256, BF16, more=7)
    found = w4a16_gemm_of_experts(x, w, ends, TWO_SIZES, early=early, change=change)
    untouched = bool((found[-7:].view(torch.uint8) == POISON).all())
    return untouched and torch.equal(found[:-7], by_expert(x, ends, dense))


def test_most_tiles_hold_all_rows():
    one = Variant(64, 1, 1, 3, grouped=True)
    for counts in ((1, 1, 1), (300, 0, 0), (64, 65, 128)):
        assert sum(-(-rows // 64) for rows in counts) * 2 <= most_tiles(one, sum(counts), 3, 256)


def test_the_model_finds_what_was_quickest():
    """Had it the rows of each expert, which only the device knows, and which are within a tenth of each other."""
    losses = []
    for (scheme, features, length, rows, count), times in measured("sm90_w4a16_gemm").items():
        weight, every = decoded(scheme), [int(each) for each in rows.split()]

        def taken(one, length=length, features=features, weight=weight, every=every, count=count):
            whole, small = (
                nanoseconds(each, length, weight) for each in (one.tokens, one.small or one.tokens)
            )
            tiles = tiles_of(one, every, count)
            return longest(*(-(-features // 128) * number for number in tiles), whole, small, 132)

        variants = [*candidates(weight)]
        losses.append(times[min(variants, key=taken).name] / min(times[one.name] for one in variants))
    assert len(losses) == 96
    assert max(losses) <= 1.05
    assert sum(losses) / len(losses) <= 1.01


def in_turn(many, few, whole, small, programs):
    """Times of programs that take tiles one after the other, each the next that is its own."""
    taken = [0.0] * programs
    for at in range(many + few):
        taken[at % programs] += whole if at < many else small
    return max(taken)


@pytest.mark.parametrize("many", [0, 1, 7, 8, 21])
@pytest.mark.parametrize("few", [0, 1, 8, 13, 16])
def test_the_longest_program_is_that_of_the_kernels_order(many, few):
    assert longest(many, few, 5.0, 2.0, 8) == in_turn(many, few, 5.0, 2.0, 8)


def test_tiles_are_counted_as_the_kernel_has_them():
    one = Variant(64, 1, 1, 3, 16, grouped=True)
    assert tiles_of(one, [0, 1, 16, 17, 64, 80, 81], 7) == (1 + 1 + 1 + 2, 2 + 1)
    assert tiles_of(one._replace(small=0), [0, 1, 16, 17, 64, 80, 81], 14) == (16, 0)


@pytest.mark.parametrize("experts", [2, 8, 128])
def test_divisions_have_the_average(experts):
    for rows in divisions(400, experts):
        assert abs(sum(rows) / len(rows) / 400 - 1) <= 0.2
        assert min(rows) >= 200
        assert max(rows) <= 600
