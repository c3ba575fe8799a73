"""`direct.cu` in the emulator: exact products, every code, bounds, planted faults; what it takes."""

from functools import lru_cache

import pytest
import torch

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemv.variants import DIRECT, MOST_SHARED, STEP, Direct, Form, sources
from fast.launch import nvrtc
from fast.matmul.preshuffled import layout
from tests.emulator.faults import assert_seen, every_second, unchanged
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_w4a16_gemv.emulated import Device
from tests.fast.kernels.sm90_w4a16_gemv.test_elements import every_byte
from tests.fast.kernels.sm90_w4a16_gemv.test_emulated import arranged
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

BF16, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
#: Scheme; rows and columns of the weight, rows of x; dtypes of x and y; the variant.
CASES = {
    "phases of unlike lengths": ("int8_rowwise", (128, 640, 3), BF16, BF16, Direct(8, 2, 3, 4)),
    "zero points, float16": ("int8_rowwise_asymmetric", (128, 256, 8), HALF, WIDE, Direct(8, 4, 2, 2)),
    "fp8, a slab, 11 rows": ("fp8_rowwise", (128, 640, 11), BF16, HALF, Direct(16, 1, 3, 4)),
    "fp8, float16, one scale": ("fp8_tensorwise", (128, 256, 1), HALF, HALF, Direct(8, 2, 2, 4)),
    "mxfp8": ("mxfp8_e4m3", (128, 512, 5), BF16, WIDE, Direct(8, 8, 1, 4)),
    "mxfp8, 16 rows": ("mxfp8_e4m3", (128, 384, 16), BF16, BF16, Direct(16, 2, 2, 2)),
    "fewer atoms than places": ("int8_rowwise", (128, 128, 2), BF16, BF16, Direct(8, 2, 2, 8)),
    "int4, groups of two atoms": ("int4_g128", (128, 640, 3), BF16, BF16, Direct(8, 2, 3, 3)),
    "int4, a group an atom, float16": ("int4_g64", (128, 512, 9), HALF, WIDE, Direct(16, 4, 2, 4, ahead=True, late=True)),
}  # fmt: skip


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_variants_give_exact_sums(name, early):
    require_nvrtc()
    scheme, (rows, length, count), dtype, out, variant = CASES[name]
    w, x = exact_weight(named(scheme), rows, length), exact_inputs(count, length, dtype)
    bias = (torch.arange(rows) % 7 - 3).to(dtype)
    got = Device(early=early, seed=1).product(x, arranged(w), bias, variant=variant, dtype=out)
    assert_same_bits(got, exact_result(x.float(), w, bias.float()).to(out))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(HALF, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_every_code_is_exact(element, dtype):
    """One column a row of x: the element times its row's scale, rounded once; then x's scale and the bias."""
    require_nvrtc()
    stored, codes = every_byte(128, 128, element, 0)
    scale, own = torch.rand(1, 128) + 0.5, torch.rand(16) + 0.5
    w = ArrangedWeight(layout.arranged(stored, element), scale, None, (128, 128), element, 0)
    x, bias = torch.eye(16, 128, dtype=dtype), torch.rand(128)
    got = Device(early=True).product(x, w, bias, variant=Direct(16, 4, 2, 2), dtype=WIDE, x_scale=own)
    values = codes.view(torch.int8) if element == "int8" else codes.view(torch.float8_e4m3fn)
    wanted = (values.float() * scale.t()).t()[:16] * own[:, None] + bias
    assert_same_bits(got, wanted)


def test_every_code_is_exact_under_its_factor():
    require_nvrtc()
    w = exact_weight(named("mxfp8_e4m3"), 128, 128)
    w.codes[:] = every_byte(128, 128, "e4m3_mx", 32)[0]
    x, held = torch.eye(16, 128, dtype=BF16), arranged(w)
    held.scale.view(torch.float32)[0] = 2.0
    got = Device(early=True).product(x, held, variant=Direct(16, 4, 2, 2), dtype=WIDE)
    assert_same_bits(got, exact_result(x.float(), w, None) * 2)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "fp8_rowwise", "mxfp8_e4m3"])
def test_random_values_are_within_the_bound(scheme):
    require_nvrtc()
    w, x = weight(named(scheme), 128, 512), inputs(3, 512, BF16)
    assert (
        outside(Device(early=False).product(x, arranged(w), None, variant=Direct(8, 4, 2, 4)), x, w, None)
        == 0
    )


FAULTS = {
    "x is read before it is there": ("    wait_for(bars + i / EACH * 8, 0);\n", ""),
    "x of another piece is waited for": ("bars + i / EACH * 8", "bars"),
    "sums are added before all are there": ('  asm volatile("bar.sync 0;" ::: "memory");\n#pragma', "#pragma"),
    "a phase is left out": ("int phase = 0; phase < PHASES", "int phase = 1; phase < PHASES"),
    "an atom too soon": ("from.load(j, i + EACH)", "from.load(j, i + EACH - 1)"),
    "an atom of no one": ("if (i >= atoms) return;", "if (i > atoms) return;"),
    "both halves are the first": ("load_stream(at + part * PART)", "load_stream(at)"),
    "x's first half twice": ("at + half * 64", "at"),
    "the first atom's factors": ("factors + i * next", "factors"),
    "factors of other rows": ("slab * 8 + lane / 4) * 4),\n        next", "slab * 8 + lane % 4) * 4),\n        next"),
    "without the weight's own scale": ("scales.low = scales.high =", "scales.low ="),
}  # fmt: skip


@lru_cache(maxsize=1)
def product_of_factors(change=unchanged, early=True):
    """Four pieces of x; MXFP8, random values, a scale of the weight's own."""
    w, x = weight(named("mxfp8_e4m3"), 128, 512), inputs(2, 512, BF16)
    held = arranged(w)
    held.scale.view(torch.float32)[0] = 2.0
    return Device(early=early, seed=3, change=change).product(x, held, variant=Direct(8, 4, 2, 2), dtype=WIDE)


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    return torch.equal(product_of_factors.__wrapped__(change, early), product_of_factors())


def test_what_it_takes():
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


@pytest.mark.parametrize("element", DIRECT)
def test_variants_compile_for_hopper(element):
    require_nvrtc()
    form = Form(element, 32 if element == "e4m3_mx" else 0, False, False, "bfloat16")
    for one in (Direct(8, 7, 4, 4), Direct(16, 2, 14, 4)):
        assert one.shared(form, one.tokens, 4096 // STEP) <= MOST_SHARED
        assert nvrtc.compile_source(*sources(one, form))[0][:4] == b"\x7fELF"
