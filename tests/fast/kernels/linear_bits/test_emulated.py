"""The kernel's PTX in the emulator, against the exact product bit for bit: codes, scales, zero points, parts of K, odd sizes."""

import pytest
import torch

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.linear_bits.variants import Variant
from tests.fast.kernels.linear_bits.emulated import product
from tests.fast.kernels.sparse_mm.examples import require_nvrtc
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

BF16, HALF = torch.bfloat16, torch.float16
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
    got = product(x, w, bias, variant, early=early, seed=1)
    assert_same_bits(got, exact_result(x, w, bias))
