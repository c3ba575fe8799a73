"""NF4, elements with factors, and x in stages, in the emulator: exact products, every code, bounds, banks, planted faults."""

from functools import lru_cache
from itertools import product

import pytest
import torch

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemv.select import choose
from fast.kernels.sm90_w4a16_gemv.variants import ATOMS, Form, Variant, sources
from fast.launch import nvrtc
from fast.matmul.preshuffled import layout
from fast.scale_factors import SECOND, TERMS
from tests.emulator.device.machine import Machine
from tests.emulator.faults import assert_seen, at_night, every_second, unchanged
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_w4a16_gemv.emulated import Device
from tests.fast.kernels.sm90_w4a16_gemv.test_emulated import arranged
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

BF16, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
#: Scheme; rows and columns of the weight, rows of x; dtypes of x and y; the variant.
CASES = {
    "nf4, half by a table": ("nf4", (128, 384, 3), BF16, BF16, Variant(8, 1, 2, 1, 2, 1, True, 2)),
    "nf4, parts of K, three phases": ("nf4", (128, 768, 1), BF16, WIDE, Variant(8, 1, 3, 2, 3, 1, False, 2)),
    "nf4, all by a table, float16": ("nf4", (128, 512, 11), HALF, HALF, Variant(16, 2, 2, 2, 2, 1, True, 4)),
    "nf4, no table": ("nf4", (128, 384, 8), BF16, BF16, Variant(8, 2, 1, 1, 1, 1, False, 0)),
    "mxfp4": ("mxfp4", (128, 384, 3), BF16, BF16, Variant(8, 1, 2, 1, 2, 1, True)),
    "mxfp4, parts of K": ("mxfp4", (128, 512, 16), BF16, WIDE, Variant(16, 2, 1, 2, 1, 1, False)),
    "nvfp4": ("nvfp4", (128, 512, 11), BF16, BF16, Variant(16, 2, 2, 2, 2, 1, True)),
    "nvfp4, x before": ("nvfp4", (256, 384, 1), BF16, HALF, Variant(8, 2, 2, 1, 2, 1, False)),
    "mxfp8": ("mxfp8_e4m3", (128, 384, 8), BF16, BF16, Variant(8, 1, 2, 1, 2, 1, True)),
    "mxfp8, parts of K": ("mxfp8_e4m3", (128, 512, 9), BF16, WIDE, Variant(16, 2, 2, 2, 2, 1, True)),
    "int4, x in stages": ("int4_g32_asymmetric", (128, 640, 5), HALF, HALF, Variant(8, 1, 2, 1, 2, 1, True)),
    "int8, x in stages": ("int8_rowwise", (128, 384, 13), BF16, BF16, Variant(16, 2, 2, 1, 2, 1, True)),
    "four blocks": ("nf4", (256, 512, 9), BF16, BF16, Variant(16, 4, 1, 1, 2, 1, True, 2)),
}  # fmt: skip


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", at_night(CASES, "mxfp4, parts of K", "mxfp8, parts of K", "int8, x in stages", "four blocks")
)
def test_variants_give_exact_sums(name, early):
    require_nvrtc()
    scheme, (rows, length, count), dtype, out, variant = CASES[name]
    w, x = exact_weight(named(scheme), rows, length), exact_inputs(count, length, dtype)
    bias = (torch.arange(rows) % 7 - 3).to(dtype)
    got = Device(early=early, seed=1).product(x, arranged(w), bias, variant=variant, dtype=out)
    assert_same_bits(got, exact_result(x.float(), w, bias.float()).to(out))


def every_byte(rows, columns, element, group):
    """A weight whose first 16 columns have every byte of two codes, or every code; its codes, one a byte."""
    first = torch.arange(rows)[:, None] * 8 + torch.arange(columns // 2) % 8
    if ATOMS[element] == 2048:
        stored = (first % 256).to(torch.uint8)
        return stored, torch.stack([stored & 15, stored >> 4], -1).flatten(1)
    codes = torch.stack([first * 2, first * 2 + 1], -1).flatten(1) % 256
    codes = torch.where((codes & 127) == 127, 0, codes).to(torch.uint8)
    return codes, codes


@pytest.mark.parametrize("tabled", [0, 2, 4])
@pytest.mark.parametrize("dtype", [BF16, pytest.param(HALF, marks=pytest.mark.nightly)])
def test_every_byte_of_levels_is_its_two_terms(tabled, dtype):
    """One column a row of x: hi + SECOND mid rounded once, times the scale rounded once."""
    require_nvrtc()
    rows, columns = 128, 128
    stored, codes = every_byte(rows, columns, "nf4", 64)
    scale = torch.rand(columns // 64, rows) + 0.5
    w = ArrangedWeight(layout.arranged(stored, "nf4"), scale, None, (rows, columns), "nf4", 64)
    x = torch.eye(16, columns, dtype=dtype)
    got = Device(early=True).product(x, w, variant=Variant(16, 2, 1, 1, 1, 1, True, tabled), dtype=WIDE)
    terms = torch.tensor(TERMS["float16" if dtype == HALF else "bfloat16"], dtype=torch.int32)
    hi, mid = terms.to(torch.int16).view(dtype).double().unbind(-1)
    levels = (hi + SECOND * mid).float()[codes[:, :16].long()]
    assert_same_bits(got, (levels * scale[0][:, None]).t().contiguous())


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "mxfp8_e4m3"])
def test_every_code_is_exact_under_its_factor(scheme):
    require_nvrtc()
    w = exact_weight(named(scheme), 128, 128)
    element, group = layout.form_of(w.scheme, 128)
    w.codes[:] = every_byte(128, 128, element, group)[0]
    x = torch.eye(16, 128, dtype=BF16)
    got = Device(early=True).product(x, arranged(w), variant=Variant(16, 2, 1, 1, 1, 1, True), dtype=WIDE)
    assert_same_bits(got, exact_result(x.float(), w, None))


@pytest.mark.parametrize(
    ("scheme", "length"), [("nf4", 512), ("nvfp4", 256), ("mxfp8_e4m3", 256), ("mxfp4", 256)]
)
def test_random_values_are_within_the_bound(scheme, length):
    require_nvrtc()
    w, x = weight(named(scheme), 128, length), inputs(3, length, BF16)
    got = Device(early=False).product(x, arranged(w), None, variant=Variant(8, 1, 2, 2, 2, 1, True))
    assert outside(got, x, w, None) == 0


def test_lanes_of_half_a_warp_read_pairs_of_banks_of_their_own(monkeypatch):
    """Whatever the codes are: lane l of sixteen has bytes 8 l to 8 l + 7 of all 128 that banks have side by side."""
    require_nvrtc()
    seen, step = set(), Machine._step

    def watched(one, operands, at):
        done = step(one, operands, at)
        if one.opcode != "ld.shared.v2.u32":
            return done
        address = operands.address(one.operands[1])

        def watch(th):
            seen.add((th.tid_x % 16, address(th) % 128))
            return done(th)

        return watch

    monkeypatch.setattr(Machine, "_step", staticmethod(watched))
    w, x = exact_weight(named("nf4"), 128, 384), exact_inputs(1, 384, BF16)
    Device(early=True).product(x, arranged(w), variant=Variant(8, 2, 1, 1, 1, 1, True, 4))
    assert seen == {(lane, 8 * lane) for lane in range(16)}


WAIT = "wait_for(ring.empty + 8 * stage, (i / STAGES & 1) ^ 1);"
FAULTS = {
    "x is read before it is there": ("STREAMED ? 33 : 1", "1"),
    "x is copied over what is read": (f"    {WAIT}\n#pragma unroll 4", "#pragma unroll 4"),
    "x of another stage": ("STREAMED ? begin + j", "STREAMED ? ring.stages + j"),
    "a table of other bytes": ("i / (COPIES / 2), 0)", "i / (COPIES / 2) + 1, 0)"),
    "the other row's level": ("load_levels(low, table, word, 0)", "load_levels(low, table, word, 1)"),
    "the second term is left out": ("fmaf(sums[0][t][i + 2], SECOND", "fmaf(sums[0][t][i + 2], 0.f"),
    "highest bits of other codes": ("0xFBD9u : 0xEAC8u", "0xEAC8u : 0xFBD9u"),
    "the first group's scale": ("places, scale + group * SCALE_BYTES", "places, scale"),
}  # fmt: skip


@lru_cache(maxsize=1)
def product_of_levels(change=unchanged, early=True):
    """Two stages, of which one is loaded twice; NF4, random values."""
    w, x = weight(named("nf4"), 128, 768), inputs(3, 768, BF16)
    device = Device(early=early, seed=3, change=change)
    return device.product(x, arranged(w), variant=Variant(8, 2, 1, 1, 2, 1, True, 2), dtype=WIDE)


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    return torch.equal(product_of_levels.__wrapped__(change, early), product_of_levels())


@pytest.mark.parametrize("scheme", [("nf4", 64), ("e2m1", 16), ("e2m1", 32), ("e4m3_mx", 32)])
def test_variants_of_the_rule_compile_for_hopper(scheme):
    require_nvrtc()
    form = Form(*scheme, False, False, "bfloat16")
    for count, shape in product((1, 16), ((14336, 4096), (4096, 14336))):
        one = choose(form, count, *shape)
        assert nvrtc.compile_source(*sources(one, form))[0][:4] == b"\x7fELF"
