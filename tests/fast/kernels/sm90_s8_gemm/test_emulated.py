"""The kernel's PTX in the emulator, against the reference bit for bit: swizzles, barriers, scales, what is written where."""

import ml_dtypes
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_s8_gemm.variants import Variant, fitted
from tests.emulator.faults import Planted, assert_seen, every_second
from tests.fast.kernels.sm90_s8_gemm.emulated import DenseStandIn
from tests.fast.kernels.sm90_s8_gemm.examples import expected, operands
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Variant, shape (M, N, K), dtypes of output and bias.
CASES = {
    "as it is served": (fitted(256, 2, True), (300, 264, 272), BF16, FP32),
    "narrow": (fitted(128, 2, True), (130, 136, 400), FP16, None),
    "float32": (fitted(128, 2, False), (140, 264, 272), FP32, FP16),
    "wide float32": (fitted(256, 2, False), (257, 136, 144), FP32, None),
    "without a neighbour": (fitted(32, 1, True), (70, 136, 1040), BF16, BF16),
    "more stages than steps": (fitted(32, 2, True), (70, 264, 128), FP16, FP16),
    "without skew": (Variant(64, 2, 3, True, 0), (70, 264, 400), BF16, FP32),
    "one stage behind": (Variant(64, 2, 2, True, 1), (70, 264, 400), BF16, FP32),
    "one step of 16": (fitted(32, 2, True), (33, 8, 16), BF16, FP32),
}


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_variants_give_the_bits_of_the_reference(name, early):
    require_nvrtc()
    variant, shape, dtype, bias = CASES[name]
    given = operands(*shape, bias)
    made = DenseStandIn(early=early, seed=1).multiplied(variant, "int8", dtype, *given)
    assert_same_bits(made, expected(given, dtype))


@pytest.mark.parametrize("one", ["x", "weight", "both"])
def test_one_scale(one):
    require_nvrtc()
    given = operands(40, 136, 144, FP32)
    for name, at in (("x", 1), ("weight", 4)):
        if one in (name, "both"):
            given[at] = given[at][0, 0].clone()
    made = DenseStandIn(early=True).multiplied(fitted(32, 2, True), "int8", BF16, *given)
    assert_same_bits(made, expected(given, BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_what_is_not_finite(dtype):
    """Infinities stay, overflow makes them, and every NaN is the quiet one without payload, as Triton's kernel gives it."""
    require_nvrtc()
    given = operands(40, 136, 144, FP32)
    given[1][3], given[1][5], given[1][7] = float("inf"), float("nan"), 1e36
    given[4][9], given[4][11], given[5][13] = 0.0, float("-inf"), float("nan")
    given[5][15] = torch.tensor(-1, dtype=torch.int32).view(FP32)
    made = DenseStandIn(early=True).multiplied(fitted(32, 2, dtype != FP32), "int8", dtype, *given)
    assert made.isnan().any()
    assert made.isinf().any()
    assert_same_bits(made, canonical(expected(given, dtype)))


def canonical(y):
    return torch.where(y.isnan(), torch.tensor(float("nan"), dtype=y.dtype), y)


def test_sums_of_floats():
    """Small numbers, whose sums are exact in any order; not served."""
    require_nvrtc()
    given = operands(40, 136, 144, FP32)
    numbers = [np.random.default_rng(at).integers(-4, 5, given[at].shape) for at in (0, 3)]
    for at, part in zip((0, 3), numbers, strict=True):
        given[at] = torch.from_numpy(part.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    made = DenseStandIn(early=True).multiplied(fitted(32, 2, True), "float8_e4m3fn", BF16, *given)
    sums = torch.from_numpy(numbers[0] @ numbers[1].T)
    assert_same_bits(made, (sums.float() * given[1] * given[4].t() + given[5]).to(BF16))


def cancelled(given):
    """With biases that leave nothing of one of the first two tokens, unless roundings are others."""
    products = expected([*given[:5], None], FP32)
    feature = torch.arange(products.shape[1])
    return [*given[:5], -products[feature % 16 // 8, feature]]


#: A fault of the kernel that no test of one variant on a quiet GPU need find: what is changed.
FAULTS = {
    "a stage is handed back while it is read": ("if (step > 0) release(before);", "release(at.stage);"),
    "nobody waits for the copies": ("      wait_for(ring.full + 8 * at.stage, at.parity);\n", ""),
    "codes of another instruction": ("a + 2 * i, b + 2 * i", "a + 2 * i, b"),
    "features of the other warpgroup": ("+ group * 64 * ROW, ROW", ", ROW"),
    "sums are taken before they are there": ("    finish<0>(sum);\n", ""),
    "scales of other tokens": ("side + 8 * (threadIdx.x % 4) + 4 * at", "side + 8 * (threadIdx.x % 4)"),
    "scales are not left": ("    factors.leave(thread);\n", ""),
    "scales of other features": ("thread % 32 / 4 + 8 * i;\n      scale", "thread % 32 / 4;\n      scale"),
    "x's scale comes last": ("float(low), of_tokens.x), scale[half])", "float(low), scale[half]), of_tokens.x)"),
    "a product and a sum are rounded once": (
        "__fadd_rn(__fmul_rn(__fmul_rn(float(high), of_tokens.y), scale[half]), bias.own[half])",
        "__fmaf_rn(__fmul_rn(float(high), of_tokens.y), scale[half], bias.own[half])",
    ),
    "a buffer is filled before it was read": ("    if (thread == 0) wait_written<1>();\n", ""),
    "the last tile is not waited for": ("  if (thread == 0) wait_written<0>();\n", ""),
    "nobody lets the second warpgroup begin": ("step == SKEW) skew_arrive()", "step == SKEW) {}"),
    "parts of the tokens alone": ("constexpr unsigned short ALL = PAIR > 1 ?", "constexpr unsigned short ALL = PAIR > 9 ?"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_the_emulator_sees_faults(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    given = cancelled(operands(40, 264, 528))
    made = DenseStandIn(early=early, change=change).multiplied(Variant(32, 2, 3, True), "int8", BF16, *given)
    return torch.equal(made, expected(given, BF16))


def test_the_emulator_sees_a_payload_of_nan():
    require_nvrtc()
    given = operands(40, 136, 144, FP32)
    given[5][13] = float("nan")
    stand_in = DenseStandIn(early=True, change=Planted("#define CANONICAL 1 ", "#define CANONICAL 0 "))
    made = stand_in.multiplied(fitted(32, 2, True), "int8", BF16, *given)
    assert not torch.equal(made.view(torch.int16), canonical(expected(given, BF16)).view(torch.int16))
