"""`sm90_intn_small_m` in the emulator, bit for bit: codes, scales, zero points, parts of K; planted faults."""

import pytest
import torch

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_intn_small_m.host import Variant, form_of, placed, tiles_of
from tests.emulator.faults import assert_seen, every_second
from tests.fast.kernels.sm90.products import intn_small_m, require_nvrtc
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

BF16, HALF = torch.bfloat16, torch.float16
NIGHTLY = [pytest.param(count, marks=pytest.mark.nightly) for count in (29, 48, 51, 90, 128)]
#: Scheme; rows and columns of the weight, rows of x; dtype; the variant.
CASES = {
    "int2, one row": ("int2_g32", (32, 512, 1), BF16, Variant(8, 1, 1, 2, 1, 2, 2)),
    "int3, rows that fill no tile": ("int3_g32", (37, 256, 3), BF16, Variant(8, 1, 1, 2, 1, 1, 2)),
    "int3, groups of stages": ("int3_g128_asymmetric", (16, 512, 8), HALF, Variant(8, 1, 1, 1, 1, 1, 3)),
    "int4": ("int4_g64", (32, 256, 5), BF16, Variant(8, 1, 2, 2, 1, 1, 2)),
    "int5, eight scales of a stage": ("int5_g32", (16, 512, 2), BF16, Variant(8, 1, 1, 2, 1, 2, 2)),
    "int6, zero points in words": ("int6_g32_asymmetric", (48, 256, 9), BF16, Variant(16, 2, 1, 2, 1, 1, 2)),
    "int6, zero points in bytes": ("int6_g64_asymmetric", (16, 384, 4), HALF, Variant(8, 1, 1, 1, 1, 1, 2)),
    "int2, parts of K, two tiles of x": ("int2_g64_asymmetric", (32, 512, 13), BF16, Variant(8, 1, 2, 2, 2, 1, 2)),
    "int3, a scale a row, four parts": ("int3_rowwise", (16, 512, 3), BF16, Variant(8, 1, 1, 1, 4, 1, 2)),
    "int5, sixteen scales of a stage": ("int5_g32_asymmetric", (20, 512, 1), BF16, Variant(8, 1, 1, 4, 1, 4, 2)),
    "int6, groups of two stages": ("int6_g256", (32, 512, 2), HALF, Variant(8, 1, 2, 1, 1, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_variants_give_exact_sums(name, early):
    require_nvrtc()
    scheme, (rows, length, count), dtype, variant = CASES[name]
    w, x = exact_weight(named(scheme), rows, length), exact_inputs(count, length, dtype)
    bias = (torch.arange(rows) % 7 - 3).to(dtype)
    got = intn_small_m(x, w, bias, variant, early=early, seed=1)
    assert_same_bits(got, exact_result(x, w, bias))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(HALF, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_every_code_in_every_place_is_exact_less_any_zero_point(bits, dtype):
    """One column a row of x: the code less the zero point, of all in 8 bits, times the scale, rounded once."""
    require_nvrtc()
    record, draw = named(f"int{bits}_g32_asymmetric"), torch.Generator().manual_seed(bits)
    w = weight(record, 16, 128)
    w.codes[:] = torch.randint(0, 256, w.codes.shape, generator=draw).to(torch.uint8)
    w.zero[:] = torch.randint(-128, 128, w.zero.shape, generator=draw).to(torch.int8)
    w.zero[0], w.zero[1] = -128, 127
    w.scale[:] = 2.0 ** torch.randint(-3, 4, w.scale.shape, generator=draw)
    for first in (0, 48):
        x = torch.eye(128, dtype=dtype)[first : first + 16]
        got = intn_small_m(x, w, None, Variant(16, 1, 1, 2, 1, 1, 2), early=True)
        assert_same_bits(got, exact_result(x, w, None))


@pytest.mark.parametrize("count", [2, pytest.param(7, marks=pytest.mark.nightly), 15, *NIGHTLY])
def test_tiles_of_the_rule_give_exact_sums(count):
    require_nvrtc()
    scheme = ("int6_g32_asymmetric", "int3_g32", "int5_g128_asymmetric", "int2_g64")[count % 4]
    w, x = exact_weight(named(scheme), 40, 512), exact_inputs(count, 512, BF16)
    form = form_of(w.scheme, (40, 512), 1, True)
    for tile, _ in tiles_of(count):
        got = intn_small_m(x, w, None, placed(tile, form, count, 40, 512), early=count % 2 == 0)
        assert_same_bits(got, exact_result(x, w, None))


@pytest.mark.parametrize("scheme", ["int2_g32_asymmetric", "int3_g32", "int6_g128"])
def test_random_values_are_within_the_bound(scheme):
    require_nvrtc()
    w, x = weight(named(scheme), 32, 512), inputs(3, 512, BF16)
    assert outside(intn_small_m(x, w, None, Variant(8, 1, 2, 2, 2, 1, 2), early=False), x, w, None) == 0


def test_nan_stays_in_its_row():
    """Of a scale, in one row of the weight; of x, in one row of x."""
    require_nvrtc()
    w, x = weight(named("int3_g32"), 20, 256), inputs(3, 256, BF16)
    w.scale[9, 3] = float("nan")
    x[1, 200] = float("nan")
    got = intn_small_m(x, w, None, Variant(8, 1, 1, 2, 1, 1, 2), early=True).isnan()
    wanted = (torch.arange(20) == 9)[None, :] | (torch.arange(3) == 1)[:, None]
    assert torch.equal(got, wanted)


FAULTS = {
    "a stage is read before it is there": ("    arrived();\n", ""),
    "others' copies are not waited for": (
        '    asm volatile("bar.sync 0;" ::: "memory");  // all copies', "    // all copies"),
    "a stage is loaded before it is read": ("const int next = index + STAGES - 1,", "const int next = index + STAGES,"),
    "x is not paired": ("    if constexpr (PAIRED) copies", "    if constexpr (false) copies"),
    "the ring is written before it is read": (
        '  asm volatile("bar.sync 0;" ::: "memory");  // the ring', "  // the ring"),
    "sums are added before all are there": ("  sync_cluster();\n  finish", "  finish"),
    "the other row's scale": ("i < 2 ? w.low_scale[h] : w.high_scale[h]", "i < 2 ? w.high_scale[h] : w.low_scale[h]"),
    "zero points of the other row": (
        "load_less(from.zero + zero + (16 * h + 8)", "load_less(from.zero + zero + (16 * h)"),
    "the sign is not turned": ("SIGNED ? 1u << (BITS - 1) : 0u", "SIGNED ? 0u : 0u"),
    "a part of K is left out": ("int s = 0; s < SPLITS", "int s = 1; s < SPLITS"),
    "a phase is left out": ("int phase = 0; phase < PHASES", "int phase = 1; phase < PHASES"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    w, x = exact_weight(named("int3_g32_asymmetric"), 32, 768), exact_inputs(11, 768, BF16)
    variant = Variant(16, 1, 1, 2, 2, 1, 2)
    got = intn_small_m(x, w, None, variant, early=early, seed=3, change=change, at_once=2)
    return torch.equal(got, exact_result(x, w, None))
