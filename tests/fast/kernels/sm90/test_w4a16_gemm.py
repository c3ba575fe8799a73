"""`sm90_w4a16_gemm` in the emulator, bit for bit: every element of the weight, integers, order of words, swizzles, barriers;
NF4's levels, scales that are factors, scales of rows of x; planted faults.

Rows of x with one 1 copy elements of the weight; products of integers are exact. So what the emulator does not know, how the
tensor core rounds, does not enter.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

import fast
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_w4a16_gemm import host
from fast.kernels.sm90_w4a16_gemm.host import Variant, Weight, weight_of
from fast.launch.nvrtc import CompileError
from fast.matmul.preshuffled import layout
from fast.scale_factors import BLOCK, ArrangedWeight
from reference import Quantized
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import assert_shown, at_night, by_product
from tests.fast.kernels.compiling.kernel_samples import by_day
from tests.fast.kernels.compiling.kernel_samples import named as named_features
from tests.fast.kernels.sm90.products import arranged, require_nvrtc, w4a16_gemm
from tests.support.linear_cases import exact_levels

BF16, F16 = torch.bfloat16, torch.float16
#: Variant; scheme; shape (M, N, K); dtype of x; that of a bias.
CASES = {
    "int4": (Variant(16, 1, 1, 3), "int4_g128", (19, 256, 256), BF16, None),
    "groups of 64": (Variant(32, 1, 1, 3), "int4_g64", (33, 128, 256), BF16, torch.float32),
    "groups of 32": (Variant(16, 1, 1, 4), "int4_g32", (17, 128, 384), F16, F16),
    "groups of 32 with zero points": (Variant(16, 1, 1, 3), "int4_g32_asymmetric", (5, 128, 256), BF16, BF16),
    "int4 with zero points": (Variant(16, 2, 1, 3), "int4_g128_asymmetric", (20, 384, 256), F16, None),
    "int8": (Variant(16, 2, 1, 3), "int8_rowwise", (9, 256, 256), BF16, F16),
    "int8 with zero points": (Variant(16, 1, 1, 3), "int8_rowwise_asymmetric", (9, 128, 128), BF16, None),
    "e4m3": (Variant(16, 1, 1, 3), "fp8_rowwise", (9, 128, 256), BF16, None),
    "e4m3, one scale": (Variant(16, 1, 1, 3), "fp8_tensorwise", (9, 128, 256), F16, None),
    "mxfp8": (Variant(16, 1, 1, 3), "mxfp8_e4m3", (9, 128, 256), BF16, None),
    "mxfp8, splits": (Variant(32, 1, 3, 3), "mxfp8_e4m3", (33, 256, 640), F16, BF16),
    "mxfp4": (Variant(16, 1, 1, 3), "mxfp4", (19, 256, 384), BF16, None),
    "mxfp4, pairs": (Variant(32, 2, 2, 4), "mxfp4", (33, 384, 256), F16, F16),
    "nvfp4": (Variant(16, 1, 1, 3), "nvfp4", (19, 256, 384), BF16, torch.float32),
    "nvfp4, pairs": (Variant(32, 2, 1, 4), "nvfp4", (33, 384, 256), F16, None),
    "nvfp4, splits": (Variant(16, 1, 2, 3), "nvfp4", (20, 128, 640), BF16, BF16),
    "split in three": (Variant(16, 1, 3, 3), "int4_g64", (20, 128, 640), BF16, None),
    "split in two": (Variant(32, 1, 2, 3), "int4_g128", (33, 256, 640), BF16, BF16),
    "pairs, splits": (Variant(32, 2, 2, 5), "int8_rowwise", (40, 384, 256), F16, torch.float32),
    "boxes without tokens": (Variant(96, 1, 1, 3), "int4_g128", (100, 128, 256), BF16, None),
    "boxes without tokens, pairs": (Variant(96, 2, 1, 4), "mxfp4", (130, 256, 256), BF16, None),
    "boxes without tokens, splits": (Variant(96, 2, 2, 5), "int4_g64", (30, 256, 256), BF16, None),
    "K slices": (Variant(32, 1, 1, 4, k_slices=2), "int4_g128", (33, 256, 512), BF16, BF16),
    "K slices, groups of 32": (Variant(16, 1, 1, 6, k_slices=2), "int4_g32_asymmetric", (17, 128, 640), F16, None),
    "K slices, e4m3": (Variant(96, 1, 1, 4, k_slices=2), "fp8_rowwise", (70, 128, 256), BF16, None),
    "K slices, nvfp4": (Variant(32, 1, 1, 4, k_slices=2), "nvfp4", (20, 256, 256), BF16, None),
    "wide": (Variant(192, 2, 1, 4), "int4_g128", (200, 256, 256), BF16, BF16),
}  # fmt: skip


def features_of(name):
    """Each scheme, each way of tiles, and what x and a bias are."""
    one, scheme, _, dtype, biased = CASES[name]
    tiles = named_features(
        pair=one.pair, splits=one.splits > 1, k_slices=one.k_slices, boxes=one.tokens >= 96
    )
    return [*tiles, *named_features(scheme=scheme, dtype=dtype, biased=biased)]


def stored(scheme, n, k, seed=0):
    """A weight as the kernel takes it, and what it stands for."""
    draw = torch.Generator().manual_seed(seed)
    w = fast.quantize(
        torch.randn(n, k, generator=draw) * 3, named(scheme), packed=named(scheme).format.bits < 8
    )
    return arranged(w), fast.dequantize(w)


def expected(x, dense, bias):
    """Exact sums, the bias added in float32, one rounding."""
    sums = (x.double() @ dense.to(x.dtype).double().t()).float()
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def given(m, n, k, dtype, biased, seed=0):
    """Rows with one 1 each, and a bias."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.zeros(m, k, dtype=dtype)
    x[torch.arange(m), torch.randint(0, k, (m,), generator=draw)] = 1
    return x, None if biased is None else torch.randn(n, generator=draw).to(biased)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", by_day(CASES, features_of))
def test_elements_of_the_weight_are_those_of_dequantize(name, early):
    require_nvrtc()
    variant, scheme, (m, n, k), dtype, biased = CASES[name]
    w, dense = stored(scheme, n, k)
    x, bias = given(m, n, k, dtype, biased)
    found = w4a16_gemm(x, w, bias, variant, early=early, seed=1)
    assert_same_bits(found, expected(x, dense, bias))


def integers(m, n, k):
    """Integers, scales that are powers of two."""
    w, _ = stored("int4_g128", n, k)
    w = replace(
        w,
        scale=2.0 ** torch.randint(-1, 2, w.scale.shape, generator=torch.Generator().manual_seed(1)).float(),
    )
    x = torch.randint(-2, 3, (m, k), generator=torch.Generator().manual_seed(2)).to(BF16)
    dense = layout.all_rows(w.words, "int4")
    codes = torch.stack([dense & 15, dense >> 4], -1).reshape(n, k).to(torch.int8)
    values = torch.where(codes > 7, codes - 16, codes).float().view(n, -1, 128) * w.scale.t()[:, :, None]
    return x, w, expected(x, values.view(n, k), None)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_sums_of_integers(early):
    require_nvrtc()
    x, w, right = integers(37, 256, 640)
    assert weight_of(w).parts == 1
    assert_same_bits(w4a16_gemm(x, w, None, Variant(32, 2, 1, 3), early=early), right)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stages", [2 * 2, pytest.param(2 * 3, marks=pytest.mark.nightly)])
def test_sums_of_slices_of_k(early, stages):
    """Several tiles of a program, of more tokens than are left at once."""
    require_nvrtc()
    x, w, right = integers(96, 256, 640)
    assert_same_bits(w4a16_gemm(x, w, None, Variant(80, 1, 1, stages, k_slices=2), early=early), right)


@pytest.mark.parametrize("stages", [3, 5])
def test_stages_are_those_of_one_slice(stages):
    """Else a warpgroup would not see whether it waits for a phase, or for the next but one."""
    require_nvrtc()
    x, w, _ = integers(16, 128, 256)
    with pytest.raises(CompileError, match="STAGES"):
        w4a16_gemm(x, w, None, Variant(16, 1, 1, stages, k_slices=2), early=True)


# Levels

N, K = 128, 384
#: Variant; columns of the weight and rows of x; dtype of x; that of a bias.
LEVEL_CASES = {
    "ahead": (Variant(16, 1, 1, 3), (256, 19), BF16, None),
    "pairs": (Variant(32, 2, 1, 4), (384, 33), F16, BF16),
    "splits": (Variant(32, 1, 3, 3), (256, 20), BF16, torch.float32),
    "pairs, splits": (Variant(32, 2, 2, 5), (384, 40), F16, None),
    "K slices": (Variant(32, 1, 1, 4, k_slices=2), (256, 33), BF16, BF16),
    "small tiles": (Variant(48, 1, 1, 3, 16), (128, 60), BF16, None),
}


def every_code(n=N, k=K):
    """A weight whose words have every code in every place, by scales of all sizes, also subnormal ones, infinity left out."""
    draw = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 256, (n, k // 2), generator=draw).to(torch.uint8)
    scale = torch.randn(k // BLOCK, n, generator=draw) * 2.0 ** torch.randint(
        -130, 3, (k // BLOCK, n), generator=draw
    )
    levels = torch.tensor(named("nf4").format.values.tolist()).float()
    return of_levels(codes, scale.float(), levels), values_of(codes, scale.float(), levels)


def of_levels(codes, scale, levels):
    """As the kernel takes it: levels behind the scales."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    behind = torch.zeros(1, n)
    behind[0, :16] = levels
    words = torch.cat([scale, behind]).view(torch.int32)
    return ArrangedWeight(layout.arranged(codes, "nf4"), words, None, (n, k), "nf4", BLOCK)


def values_of(codes, scale, levels):
    """Levels times scales, rounded to float32."""
    found = levels[torch.stack([codes & 15, codes >> 4], -1).long()].reshape(codes.shape[0], -1, BLOCK)
    return (found * scale.t()[:, :, None]).reshape(codes.shape[0], -1)


@pytest.mark.parametrize("name", at_night(LEVEL_CASES, "pairs", "splits", "pairs, splits", "small tiles"))
def test_levels_are_those_of_dequantize(name):
    require_nvrtc()
    variant, (n, m), dtype, biased = LEVEL_CASES[name]
    w, dense = stored("nf4", n, K)
    assert weight_of(w) == Weight("nf4")
    x, bias = given(m, n, K, dtype, biased)
    found = w4a16_gemm(x, w, bias, variant, early=name == "ahead", seed=1)
    assert_same_bits(found, expected(x, dense, bias))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.nightly)])
def test_every_code_in_every_place(dtype):
    """Each column copied by a row of x."""
    require_nvrtc()
    w, dense = every_code()
    counts = torch.stack([(w.words.view(-1) >> 4 * place & 15).bincount(minlength=16) for place in range(8)])
    assert int(counts.min()) > 0
    found = w4a16_gemm(torch.eye(K, dtype=dtype), w, None, Variant(192, 1, 1, 3), early=True)
    assert_same_bits(found, dense.to(dtype).t() + 0.0)


def test_levels_are_those_of_the_weight():
    """Any 16 float32, which lie behind the scales."""
    require_nvrtc()
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (N, K // 2), generator=draw).to(torch.uint8)
    scale, levels = torch.rand(K // BLOCK, N, generator=draw), torch.randn(16, generator=draw)
    x, _ = given(16, N, K, BF16, None)
    found = w4a16_gemm(x, of_levels(codes, scale, levels), None, Variant(16, 1, 1, 3), early=False)
    assert_same_bits(found, expected(x, values_of(codes, scale, levels), None))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "variant", [Variant(32, 1, 1, 3), Variant(32, 1, 1, 4, k_slices=2), Variant(32, 1, 2, 3)]
)
def test_sums_of_levels(early, variant):
    """Of integers, with scales that are powers of two: exact in any order."""
    require_nvrtc()
    q = exact_levels(named("nf4"), N, K)
    w = arranged(q)
    x = torch.randint(-2, 3, (20, K), generator=torch.Generator().manual_seed(2)).to(BF16)
    dense = values_of(
        q.codes, w.scale[: K // BLOCK].view(torch.float32), torch.tensor(q.scheme.format.values.tolist())
    )
    assert_same_bits(w4a16_gemm(x, w, None, variant, early=early), expected(x, dense, None))


def test_a_scale_that_is_nan_is_that_of_its_row():
    require_nvrtc()
    w, _ = every_code()
    scale = w.scale.clone()
    scale[2, 5] = 0x7FC00000
    x = torch.eye(K, dtype=BF16)[120:136]
    found = w4a16_gemm(x, replace(w, scale=scale), None, Variant(16, 1, 1, 3), early=False)
    assert found.isnan().nonzero().tolist() == [[row, 5] for row in range(16)]


# Scales that are factors

SCHEMES = ("mxfp4", "nvfp4", "mxfp8_e4m3")
#: Exponents of e8m0 of which the largest are beyond what a factor holds, their elements still finite; those of small elements.
LARGE, SMALL = {"mxfp4": 246, "mxfp8_e4m3": 239}, {"mxfp4": 103, "mxfp8_e4m3": 110}

#: An outer scale for which it matters that scales times it are rounded to float32 first.
OUTER = float.fromhex("0x1.cd20d4p-5")


def of_factors(scheme, n, k, scale, outer=None):
    """Random codes, but for NaN, with such scales (N, blocks): as the kernel takes them, and what they stand for."""
    record, draw = named(scheme), torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (n, k * record.format.bits // 8), generator=draw).to(torch.uint8)
    if record.format.bits == 8:
        codes[(codes & 0x7F) == 0x7F] = 0
    q = Quantized(codes, scale, outer, None, (n, k), 1, record, packed=record.format.bits < 8)
    return arranged(q), fast.dequantize(q)


def any_scales(scheme, n, k, exponents=LARGE):
    """A weight with every e4m3 scale, zero too, under one that rounds; or exponents, the largest beyond a factor's."""
    draw = torch.Generator().manual_seed(6)
    if scheme == "nvfp4":
        codes = torch.randint(0, 127, (n, k // 16), generator=draw).to(torch.uint8)
        return of_factors(scheme, n, k, codes, torch.tensor(OUTER))
    fields = torch.randint(0, 7, (n, k // 32), generator=draw) + exponents[scheme]
    return of_factors(scheme, n, k, fields.to(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_element_under_its_factor(scheme):
    """128 columns, each copied by a row of x."""
    require_nvrtc()
    w, dense = any_scales(scheme, 128, 128)
    assert scheme == "nvfp4" or int(w.scale[0, 0]) >> 23 > 127
    x = torch.eye(128, dtype=BF16)
    found = w4a16_gemm(x, w, None, Variant(128, 1, 1, 3), early=True)
    assert found.isfinite().all()
    assert_same_bits(found, expected(x, dense, None))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float16_rounds_factors_once(scheme):
    """Elements that are subnormal numbers of float16, too."""
    require_nvrtc()
    w, dense = any_scales(scheme, 128, 128, SMALL)
    x, _ = given(16, 128, 128, F16, None)
    found = w4a16_gemm(x, w, None, Variant(16, 1, 1, 3), early=False)
    assert_same_bits(found, expected(x, dense, None))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sums_of_factors(scheme, early):
    """Of integers, with scales that are powers of two: exact in any order."""
    require_nvrtc()
    m, n, k = 20, 256, 384
    nv = scheme == "nvfp4"
    powers = torch.randint(-1, 2, (n, k // (16 if nv else 32)), generator=torch.Generator().manual_seed(3))
    narrow = (2.0 ** powers.float()).to(torch.float8_e4m3fn if nv else torch.float8_e8m0fnu)
    w, dense = of_factors(scheme, n, k, narrow.view(torch.uint8), torch.tensor(2.0) if nv else None)
    x = torch.randint(-2, 3, (m, k), generator=torch.Generator().manual_seed(2)).to(BF16)
    found = w4a16_gemm(x, w, None, Variant(32, 1, 1, 3), early=early)
    assert_same_bits(found, expected(x, dense, None))


# Scales of rows of x

#: Variant; scheme; shape (M, N, K); dtype of x; that of a bias.
SCALED_CASES = {
    "ahead": (Variant(16, 1, 1, 3), "int4_g32", (40, 256, 256), BF16, BF16),
    "no bias": (Variant(32, 1, 1, 3), "int8_rowwise", (33, 128, 256), F16, None),
    "pairs": (Variant(32, 2, 1, 4), "nvfp4", (70, 384, 256), BF16, torch.float32),
    "splits": (Variant(16, 1, 3, 3), "int4_g64", (20, 128, 640), BF16, F16),
    "pairs, splits": (Variant(32, 2, 2, 5), "int8_rowwise", (40, 384, 256), F16, None),
    "K slices": (Variant(32, 1, 1, 4, k_slices=2), "int4_g32_asymmetric", (90, 256, 512), BF16, BF16),
    "small tiles": (Variant(48, 1, 1, 3, 16), "nf4", (60, 128, 384), BF16, torch.float32),
    "wide": (Variant(192, 1, 1, 4), "int4_g128", (200, 128, 256), BF16, None),
}


def scales(count, seed=0):
    """Of as many rows."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 3 - 1


def finished(sums, x_scale, bias, dtype):
    """Sums in float32 times the scale, plus the bias, each rounded to float32, then to the dtype."""
    made = sums.float() * x_scale[:, None]
    return (made if bias is None else made + bias.float()).to(dtype)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", at_night(SCALED_CASES, "no bias", "pairs", "pairs, splits", "wide"))
def test_sums_are_multiplied_before_the_bias_is_added(name, early):
    """Rows with one 1 copy elements of the weight."""
    require_nvrtc()
    variant, scheme, (m, n, k), dtype, biased = SCALED_CASES[name]
    w, dense = stored(scheme, n, k)
    x, bias = given(m, n, k, dtype, biased)
    x_scale = scales(m)
    found = w4a16_gemm(x, w, bias, variant, x_scale=x_scale, early=early, seed=1)
    sums = x.double() @ dense.to(dtype).double().t()
    assert_same_bits(found, finished(sums, x_scale, bias, dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("early", [False, True])
def test_scales_of_one_are_none(early):
    """By several tiles of a program."""
    require_nvrtc()
    x, w, right = integers(96, 256, 640)
    found = w4a16_gemm(x, w, None, Variant(80, 1, 1, 4, k_slices=2), x_scale=torch.ones(96), early=early)
    assert_same_bits(found, right)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_launch_of_a_call(monkeypatch, scaled):
    """What `exact_inputs` launches behind its own kernel: run on tensors, and by their addresses."""
    require_nvrtc()
    w, dense = stored("int4_g32", 128, 256)
    x, bias = given(40, 128, 256, BF16, BF16)
    x_scale = scales(40) if scaled else None
    device, y = StandIn(), torch.zeros(40, 128, dtype=BF16)
    pointers = [x, w.words, w.scale, w.zero, bias, y, *([x_scale] if scaled else [])]
    for one in pointers:
        if one is not None:
            device.add(one)
    with device.installed():
        launch = host.launch_of(w, 40, BF16, -1, Variant(16, 1, 1, 3), scaled=scaled)
        signature = launch.run(pointers, -1)
        right = finished(
            x.double() @ dense.to(BF16).double().t(), scales(40) if scaled else torch.ones(40), bias, BF16
        )
        assert_same_bits(y, right)
        y.zero_()
        launch.compiled[signature].function(0, [None if one is None else one.data_ptr() for one in pointers])
    assert_same_bits(y, right)


# Planted faults


def product_of_integers(early, change):
    x, w, _ = integers(96, 128, 640)
    return w4a16_gemm(x, w, None, Variant(48, 1, 1, 3), early=early, change=change)


def product_by_slices_of_k(early, change):
    x, w, _ = integers(80, 256, 640)
    return w4a16_gemm(x, w, None, Variant(80, 1, 1, 4, k_slices=2), early=early, change=change)


def product_of_levels(early, change):
    w, _ = every_code()
    x = torch.zeros(64, K, dtype=BF16)
    x[torch.arange(64), 6 * torch.arange(64) + torch.arange(64) % 6] = 1
    return w4a16_gemm(x, w, None, Variant(64, 1, 1, 3), early=early, change=change)


def product_of_factors(early, change, *, scheme):
    w, _ = any_scales(scheme, 256, 128)
    x = torch.zeros(64, 128, dtype=BF16)
    x[torch.arange(64), 2 * torch.arange(64)] = 1
    return w4a16_gemm(x, w, None, Variant(64, 1, 1, 3), early=early, change=change)


def product_of_scaled_rows(early, change):
    """Sums of slices of K lie behind the scales."""
    w, _ = stored("int4_g128", 256, 512)
    x, _ = given(90, 256, 512, BF16, None)
    variant = Variant(32, 1, 1, 4, k_slices=2)
    return w4a16_gemm(x, w, None, variant, x_scale=scales(90), early=early, change=change)


OF_FACTORS = {scheme: partial(product_of_factors, scheme=scheme) for scheme in SCHEMES}
#: A fault of the kernel, and what is changed, by what shows it; products without it are right, as the tests above say.
FAULTS = {
    product_of_integers: {
    "a stage is handed back while it is read": ("if (!begins) release(before);", "release(own);"),
    "nobody waits for the copies": ("wait_for(ring.full + 8 * at.stage, at.parity);", ""),
    "words of other columns": ("i == 1 ? w.y", "i == 1 ? w.z"),
    "scales of another row": ("rows.scale[r % 2]", "rows.scale[r / 2]"),
    "scales of another block": ("left = PARTS > 1 ? 1 : p.each;", "left = 1;"),
    "a buffer is written while it is copied": ("wait_written<1>();", ";"),
    "it ends before it is written": ("if (SPLITS == 1 && thread == 0 && slice == 0) wait_written<0>();", ""),
    "columns of another instruction": ("x + 2 * j", "x"),
    },
    product_by_slices_of_k: {
    "a stage is handed back while it is read": ("if (step > steps.first) release(before);", "release(at.stage);"),
    "operands are written while they are read": ("finish<0>(sum);\n#pragma unroll\n      for", "#pragma unroll\n      for"),
    "sums of another slice are left out": ("add_sums(sum + i", "if (i > 4) add_sums(sum + i"),
    "nobody waits for sums": ("sync_named(left);", ";"),
    "sums are left before others were taken": ("if (!opening) sync_named(taken);", ";"),
    "both take the same stages": ("at(slice)", "at(0)"),
    },
    product_of_levels: {
    "levels of neighbours": ("u32(LEVEL) << 8 * r", "u32(LEVEL / 2) << 8 * r"),
    "columns the other way round": ("scaled(level_at(dot(low", "scaled(level_at(dot(high"),
    "pairs of another row": ("u32(LEVEL / 16) << 8 * r", "u32(LEVEL / 16) << 8 * (r ^ 1)"),
    "scales of another row": ("rows.scale[r % 2]", "rows.scale[r / 2]"),
    "levels of elsewhere": ("i64(p.steps) * p.features", "i64(p.steps - 1) * p.features"),
    "half of the table": ("i < TABLE_BYTES / 4", "i < TABLE_BYTES / 8"),
    "nobody waits for the table": ('asm volatile("bar.sync 9', 'if (thread < 0) asm volatile("bar.sync 9'),
    "the scales of the block before": ("scales += PARTS * p.features;", ""),
    },
    product_of_scaled_rows: {
    "scales of another token": ("side + 8 * (threadIdx.x % 4) + 4 * at", "side + 8 * (threadIdx.x % 2) + 4 * at"),
    "scales of the first tile": ("const int at = token + thread + 128 * i;", "const int at = thread + 128 * i;"),
    "nobody leaves scales": ("scaled.leave(thread);", ""),
    "both groups leave them in one place": ("SIDE_BYTES = SPLITS > 1 || SCALED ? GROUPS * SIDE * 4 : 0", "SIDE_BYTES = 0"),
    },
    OF_FACTORS["mxfp8_e4m3"]: {
        "factors of other columns, MX": ("i / 2 * 8", "0"),
    },
    OF_FACTORS["mxfp4"]: {
        "factors of another row, MX": ("16 * row +", "0 * row +"),
        "no scale beside factors": ("both = twice(own);", "both = 0x3F803F80u;"),
        "factors of the stage before": ("factors += row, at.advance()", "at.advance()"),
    },
    OF_FACTORS["nvfp4"]: {
        "factors of other columns, NVFP4": ("words[PARTS == 4 ? i : 0]", "words[0]"),
        "factors of another row, NVFP4": ("scale(i, 1, own)", "scale(i, 0, own)"),
        "scales are not rounded": ("scaled(first_of(pair), second_of(pair), scales[r % 2])",
        "rounded(first_of(pair) * scale(i, r % 2, 1.f) * own, second_of(pair) * scale(i, r % 2, 1.f) * own)",),
        "factors of other features": ("loaded_feature(p, tiles) / 2 * EACH", "0"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("product", "fault"), by_product(FAULTS))
def test_faults_are_seen(product, fault):
    require_nvrtc()
    assert_shown(FAULTS[product][fault], product)
