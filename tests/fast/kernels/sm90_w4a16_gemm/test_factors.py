"""Weights whose scales are factors of their elements, in the emulator: all codes by scales of all sizes, sums, and faults."""

import pytest
import torch

import fast
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemm.variants import Variant
from fast.matmul.preshuffled import layout
from reference import Quantized
from tests.emulator.device.mixed_stand_in import MixedStandIn
from tests.emulator.faults import assert_seen, every_second
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_w4a16_gemm.test_emulated import expected, given

BF16, F16 = torch.bfloat16, torch.float16
SCHEMES = ("mxfp4", "nvfp4", "mxfp8_e4m3")
#: Exponents of e8m0 of which the largest are beyond what a factor holds, their elements still finite; those of small elements.
LARGE, SMALL = {"mxfp4": 246, "mxfp8_e4m3": 239}, {"mxfp4": 103, "mxfp8_e4m3": 110}

#: An outer scale for which it matters that scales times it are rounded to float32 first.
OUTER = float.fromhex("0x1.cd20d4p-5")


def weight(scheme, n, k, scale, outer=None):
    """Random codes, but for NaN, with such scales (N, blocks): as the kernel takes them, and what they stand for."""
    record, draw = named(scheme), torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (n, k * record.format.bits // 8), generator=draw).to(torch.uint8)
    if record.format.bits == 8:
        codes[(codes & 0x7F) == 0x7F] = 0
    q = Quantized(codes, scale, outer, None, (n, k), 1, record, packed=record.format.bits < 8)
    p = layout.preshuffled(q)
    form = layout.form_of(p.scheme, k)
    return ArrangedWeight(p.codes, p.scale, p.zero, p.shape, *form), fast.dequantize(q)


def any_scales(scheme, n, k, exponents=LARGE):
    """A weight with every e4m3 scale, zero too, under one that rounds; or exponents, the largest beyond a factor's."""
    draw = torch.Generator().manual_seed(6)
    if scheme == "nvfp4":
        codes = torch.randint(0, 127, (n, k // 16), generator=draw).to(torch.uint8)
        return weight(scheme, n, k, codes, torch.tensor(OUTER))
    fields = torch.randint(0, 7, (n, k // 32), generator=draw) + exponents[scheme]
    return weight(scheme, n, k, fields.to(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_element_of_a_weight(scheme):
    """128 columns, each copied by a row of x."""
    require_nvrtc()
    w, dense = any_scales(scheme, 128, 128)
    assert scheme == "nvfp4" or int(w.scale[0, 0]) >> 23 > 127
    x = torch.eye(128, dtype=BF16)
    found = MixedStandIn(early=True).multiplied(x, w, None, Variant(128, 1, 1, 3))
    assert found.isfinite().all()
    assert_same_bits(found, expected(x, dense, None))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float16_rounds_once(scheme):
    """Elements that are subnormal numbers of float16, too."""
    require_nvrtc()
    w, dense = any_scales(scheme, 128, 128, SMALL)
    x, _ = given(16, 128, 128, F16, None)
    found = MixedStandIn(early=False).multiplied(x, w, None, Variant(16, 1, 1, 3))
    assert_same_bits(found, expected(x, dense, None))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sums(scheme, early):
    """Of integers, with scales that are powers of two: exact in any order."""
    require_nvrtc()
    m, n, k = 20, 256, 384
    nv = scheme == "nvfp4"
    powers = torch.randint(-1, 2, (n, k // (16 if nv else 32)), generator=torch.Generator().manual_seed(3))
    narrow = (2.0 ** powers.float()).to(torch.float8_e4m3fn if nv else torch.float8_e8m0fnu)
    w, dense = weight(scheme, n, k, narrow.view(torch.uint8), torch.tensor(2.0) if nv else None)
    x = torch.randint(-2, 3, (m, k), generator=torch.Generator().manual_seed(2)).to(BF16)
    found = MixedStandIn(early=early).multiplied(x, w, None, Variant(32, 1, 1, 3))
    assert_same_bits(found, expected(x, dense, None))


#: Scheme, and what is changed.
FAULTS = {
    "factors of other columns, MX": ("mxfp8_e4m3", "i / 2 * 8", "0"),
    "factors of another row, MX": ("mxfp4", "16 * row +", "0 * row +"),
    "no scale beside factors": ("mxfp4", "both = twice(own);", "both = 0x3F803F80u;"),
    "factors of other columns, NVFP4": ("nvfp4", "words[PARTS == 4 ? i : 0]", "words[0]"),
    "factors of another row, NVFP4": ("nvfp4", "scale(i, 1, own)", "scale(i, 0, own)"),
    "scales are not rounded": (
        "nvfp4", "scaled(first_of(pair), second_of(pair), scales[r % 2])",
        "rounded(first_of(pair) * scale(i, r % 2, 1.f) * own, second_of(pair) * scale(i, r % 2, 1.f) * own)",
    ),
    "factors of other features": ("nvfp4", "loaded_feature(p, tiles) / 2 * EACH", "0"),
    "factors of the stage before": ("mxfp4", "factors += row, at.advance()", "at.advance()"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_faults_are_seen(fault):
    require_nvrtc()
    scheme, *change = FAULTS[fault]
    assert_seen(change, is_right, [scheme])


def is_right(scheme, change):
    w, dense = any_scales(scheme, 256, 128)
    x = torch.zeros(64, 128, dtype=BF16)
    x[torch.arange(64), 2 * torch.arange(64)] = 1
    found = MixedStandIn(early=True, change=change).multiplied(x, w, None, Variant(64, 1, 1, 3))
    return torch.equal(found, expected(x, dense, None))
