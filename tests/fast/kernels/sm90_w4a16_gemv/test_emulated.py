"""The kernel's PTX in the emulator, against the exact product bit for bit: words, scales, zero points, barriers, parts of K."""

import pytest
import torch

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemv.select import choose, gains
from fast.kernels.sm90_w4a16_gemv.variants import Direct, Form, Variant
from fast.matmul.preshuffled import layout
from tests.emulator.faults import assert_seen, every_second
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_w4a16_gemv.emulated import Device
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

BF16, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
#: Scheme; rows and columns of the weight, rows of x; dtypes of x and y; tokens, blocks, phases, splits; stages.
CASES = {
    "one row": ("int4_g128", (128, 384, 1), BF16, BF16, (8, 1, 2, 1), 2),
    "zero points": ("int4_g128_asymmetric", (128, 256, 3), BF16, BF16, (8, 1, 2, 1), 4),
    "two blocks, parts of K": ("int4_g64", (128, 512, 11), BF16, WIDE, (16, 2, 2, 2), 2),
    "groups of 32, float16": ("int4_g32_asymmetric", (128, 256, 8), HALF, HALF, (8, 1, 1, 1), 2),
    "long groups, four parts": ("int4_g256", (128, 1024, 5), BF16, BF16, (8, 1, 2, 4), 2),
    "int8 by rows": ("int8_rowwise", (128, 384, 8), BF16, BF16, (8, 1, 2, 1), 2),
    "int8, zero points by rows": ("int8_rowwise_asymmetric", (128, 256, 4), HALF, WIDE, (8, 1, 2, 1), 2),
    "int8 in groups": ("int8_g128", (128, 256, 16), BF16, BF16, (16, 2, 1, 1), 2),
    "fp8 by rows": ("fp8_rowwise", (128, 256, 3), BF16, BF16, (8, 1, 4, 1), 4),
    "fp8 in groups, float16": ("fp8_1x128", (128, 256, 2), HALF, HALF, (8, 1, 2, 2), 2),
    "one scale": ("fp8_tensorwise", (128, 256, 2), BF16, BF16, (8, 1, 2, 1), 2),
    "32 rows": ("int4_g128", (128, 256, 29), BF16, BF16, (32, 2, 2, 1), 2),
}  # fmt: skip


def arranged(w):
    q = layout.preshuffled(w)
    return ArrangedWeight(q.codes, q.scale, q.zero, tuple(q.shape), *layout.form_of(q.scheme, q.shape[1]))


def form_of(w, dtype, out):
    return Form(w.element, w.group, w.zero is not None, dtype == HALF, str(out).removeprefix("torch."))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_variants_give_exact_sums(name, early):
    require_nvrtc()
    scheme, (rows, length, count), dtype, out, sizes, stages = CASES[name]
    w, x = exact_weight(named(scheme), rows, length), exact_inputs(count, length, dtype)
    bias = (torch.arange(rows) % 7 - 3).to(dtype)
    held = arranged(w)
    got = Device(early=early, seed=1).product(x, held, bias, variant=Variant(*sizes, stages), dtype=out)
    expected = exact_result(x, w, bias)
    assert_same_bits(got, expected if out == dtype else exact_result(x.float(), w, bias.float()))


def test_random_values_are_within_the_bound():
    require_nvrtc()
    w, x = weight(named("int4_g128_asymmetric"), 128, 256), inputs(2, 256, BF16)
    got = Device(early=False).product(x, arranged(w), None, variant=Variant(8, 1, 2, 2, 2))
    assert outside(got, x, w, None) == 0


def test_scales_of_the_rows_of_x():
    """Sums times the row's scale, plus the bias, in float32, rounded once."""
    require_nvrtc()
    w, x = exact_weight(named("int4_g128"), 128, 256), exact_inputs(3, 256, BF16)
    scale, bias = torch.tensor([0.5, 3.0, 0.0625]), torch.arange(128.0)
    got = Device(early=True).product(
        x, arranged(w), bias, variant=Variant(8, 1, 2, 1, 2), x_scale=scale, dtype=WIDE
    )
    assert_same_bits(got, exact_result(x.float(), w, None) * scale[:, None] + bias)


FAULTS = {
    "a stage is handed back before it is read": (
        "    wait_for(ring.full + 8 * stage, i / STAGES & 1);\n", ""),
    "a stage is loaded before it is handed back": (
        "    wait_for(ring.empty + 8 * stage, (i / STAGES & 1) ^ 1);\n", ""),
    "x is read before it is there": ("cp.async.wait_all;", ""),
    "sums are added before all are there": ("  sync_cluster();\n  if (warp < WARPS) finish", "  if (warp < WARPS) finish"),
    "columns in another order": ("half ? w.z : w.x", "half ? w.x : w.z"),
    "the other row's scale": ("i < 2 ? low : high", "i < 2 ? high : low"),
    "zero points of the other row": ("i % 2 ? less.high : less.low", "i % 2 ? less.low : less.high"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    w, x = exact_weight(named("int4_g128_asymmetric"), 128, 1024), exact_inputs(3, 1024, BF16)
    device = Device(early=early, seed=3, change=change)
    got = device.product(x, arranged(w), None, variant=Variant(8, 1, 2, 1, 2))
    return torch.equal(got, exact_result(x, w, None))


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
        assert one.at_once * (one.shared(form, count, steps) + 1024) <= 233472
