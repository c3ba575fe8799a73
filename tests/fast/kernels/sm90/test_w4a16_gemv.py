"""`sm90_w4a16_gemv` in the emulator, bit for bit: words, scales, zero points, barriers, parts of K; every code; planted faults.

As a stream of bulk copies, straight from memory (`Direct`), and by elements with factors or levels.
"""

import pytest
import torch

import reference
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_w4a16_gemv.host import ATOMS, Direct, Variant
from fast.matmul.preshuffled import layout
from fast.scale_factors import SECOND, TERMS, ArrangedWeight, form_of
from tests.emulator.device.machine import Machine
from tests.emulator.faults import assert_shown, at_night, by_product
from tests.fast.kernels.sm90.products import arranged, require_nvrtc, w4a16_gemv, w4a16_gemv_of_several
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, inputs, outside, weight

BF16, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
#: Scheme; rows and columns of the weight, rows of x; dtypes of x and y; the variant.
CASES = {
    "stream, one row": ("int4_g128", (128, 384, 1), BF16, BF16, Variant(8, 1, 2, 1, 2)),
    "stream, zero points": ("int4_g128_asymmetric", (128, 256, 3), BF16, BF16, Variant(8, 1, 2, 1, 4)),
    "stream, two blocks, parts of K": ("int4_g64", (128, 512, 11), BF16, WIDE, Variant(16, 2, 2, 2, 2)),
    "stream, groups of 32, float16": ("int4_g32_asymmetric", (128, 256, 8), HALF, HALF, Variant(8, 1, 1, 1, 2)),
    "stream, long groups, four parts": ("int4_g256", (128, 1024, 5), BF16, BF16, Variant(8, 1, 2, 4, 2)),
    "stream, int8 by rows": ("int8_rowwise", (128, 384, 8), BF16, BF16, Variant(8, 1, 2, 1, 2)),
    "stream, int8, zero points by rows": ("int8_rowwise_asymmetric", (128, 256, 4), HALF, WIDE, Variant(8, 1, 2, 1, 2)),
    "stream, int8 in groups": ("int8_g128", (128, 256, 16), BF16, BF16, Variant(16, 2, 1, 1, 2)),
    "stream, fp8 by rows": ("fp8_rowwise", (128, 256, 3), BF16, BF16, Variant(8, 1, 4, 1, 4)),
    "stream, fp8 in groups, float16": ("fp8_1x128", (128, 256, 2), HALF, HALF, Variant(8, 1, 2, 2, 2)),
    "stream, one scale": ("fp8_tensorwise", (128, 256, 2), BF16, BF16, Variant(8, 1, 2, 1, 2)),
    "stream, 32 rows": ("int4_g128", (128, 256, 29), BF16, BF16, Variant(32, 2, 2, 1, 2)),
    "elements, nf4, half by a table": ("nf4", (128, 384, 3), BF16, BF16, Variant(8, 1, 2, 1, 2, 1, True, 2)),
    "elements, nf4, parts of K, three phases": ("nf4", (128, 768, 1), BF16, WIDE, Variant(8, 1, 3, 2, 3, 1, False, 2)),
    "elements, nf4, all by a table, float16": ("nf4", (128, 512, 11), HALF, HALF, Variant(16, 2, 2, 2, 2, 1, True, 4)),
    "elements, nf4, no table": ("nf4", (128, 384, 8), BF16, BF16, Variant(8, 2, 1, 1, 1, 1, False, 0)),
    "elements, mxfp4": ("mxfp4", (128, 384, 3), BF16, BF16, Variant(8, 1, 2, 1, 2, 1, True)),
    "elements, mxfp4, parts of K": ("mxfp4", (128, 512, 16), BF16, WIDE, Variant(16, 2, 1, 2, 1, 1, False)),
    "elements, nvfp4": ("nvfp4", (128, 512, 11), BF16, BF16, Variant(16, 2, 2, 2, 2, 1, True)),
    "elements, nvfp4, x before": ("nvfp4", (256, 384, 1), BF16, HALF, Variant(8, 2, 2, 1, 2, 1, False)),
    "elements, mxfp8": ("mxfp8_e4m3", (128, 384, 8), BF16, BF16, Variant(8, 1, 2, 1, 2, 1, True)),
    "elements, mxfp8, parts of K": ("mxfp8_e4m3", (128, 512, 9), BF16, WIDE, Variant(16, 2, 2, 2, 2, 1, True)),
    "elements, int4, x in stages": ("int4_g32_asymmetric", (128, 640, 5), HALF, HALF, Variant(8, 1, 2, 1, 2, 1, True)),
    "elements, int8, x in stages": ("int8_rowwise", (128, 384, 13), BF16, BF16, Variant(16, 2, 2, 1, 2, 1, True)),
    "elements, four blocks": ("nf4", (256, 512, 9), BF16, BF16, Variant(16, 4, 1, 1, 2, 1, True, 2)),
    "direct, phases of unlike lengths": ("int8_rowwise", (128, 640, 3), BF16, BF16, Direct(8, 2, 3, 4)),
    "direct, zero points, float16": ("int8_rowwise_asymmetric", (128, 256, 8), HALF, WIDE, Direct(8, 4, 2, 2)),
    "direct, fp8, a slab, 11 rows": ("fp8_rowwise", (128, 640, 11), BF16, HALF, Direct(16, 1, 3, 4)),
    "direct, fp8, float16, one scale": ("fp8_tensorwise", (128, 256, 1), HALF, HALF, Direct(8, 2, 2, 4)),
    "direct, mxfp8": ("mxfp8_e4m3", (128, 512, 5), BF16, WIDE, Direct(8, 8, 1, 4)),
    "direct, mxfp8, 16 rows": ("mxfp8_e4m3", (128, 384, 16), BF16, BF16, Direct(16, 2, 2, 2)),
    "direct, fewer atoms than places": ("int8_rowwise", (128, 128, 2), BF16, BF16, Direct(8, 2, 2, 8)),
    "direct, int4, groups of two atoms": ("int4_g128", (128, 640, 3), BF16, BF16, Direct(8, 2, 3, 3)),
    "direct, int4, groups of an atom": ("int4_g64", (128, 512, 9), HALF, WIDE, Direct(16, 4, 2, 4, ahead=True, late=True)),
}  # fmt: skip


#: Of each kernel every form of scales and zero points, both inputs, parts of K and the ways of x.
BY_DAY = (
    "stream, zero points", "stream, two blocks, parts of K", "stream, groups of 32, float16", "stream, int8 by rows",
    "stream, int8, zero points by rows", "stream, fp8 in groups, float16", "stream, one scale", "stream, 32 rows",
    "elements, nf4, half by a table", "elements, nf4, parts of K, three phases", "elements, nvfp4, x before",
    "elements, mxfp8", "elements, int4, x in stages", "direct, phases of unlike lengths", "direct, zero points, float16",
    "direct, fp8, a slab, 11 rows", "direct, mxfp8, 16 rows", "direct, int4, groups of an atom",
)  # fmt: skip


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    at_night(CASES, *sorted(set(CASES) - set(BY_DAY))),
)
def test_variants_give_exact_sums(name, early):
    require_nvrtc()
    scheme, (rows, length, count), dtype, out, variant = CASES[name]
    w, x = exact_weight(named(scheme), rows, length), exact_inputs(count, length, dtype)
    bias = (torch.arange(rows) % 7 - 3).to(dtype)
    got = w4a16_gemv(x, arranged(w), bias, variant=variant, dtype=out, early=early, seed=1)
    assert_same_bits(got, exact_result(x.float(), w, bias.float()).to(out))


@pytest.mark.parametrize(
    ("scheme", "length", "variant"),
    [
        ("int4_g128_asymmetric", 256, Variant(8, 1, 2, 2, 2)),
        *((scheme, 512 if scheme == "nf4" else 256, Variant(8, 1, 2, 2, 2, 1, True))
          for scheme in ("nf4", "nvfp4", "mxfp8_e4m3", "mxfp4")),
        *((scheme, 512, Direct(8, 4, 2, 4)) for scheme in ("int8_rowwise", "fp8_rowwise", "mxfp8_e4m3")),
    ],
)  # fmt: skip
def test_random_values_are_within_the_bound(scheme, length, variant):
    require_nvrtc()
    w, x = weight(named(scheme), 128, length), inputs(3, length, BF16)
    assert outside(w4a16_gemv(x, arranged(w), variant=variant), x, w, None) == 0


def test_scales_of_the_rows_of_x():
    """Sums times the row's scale, plus the bias, in float32, rounded once."""
    require_nvrtc()
    w, x = exact_weight(named("int4_g128"), 128, 256), exact_inputs(3, 256, BF16)
    scale, bias = torch.tensor([0.5, 3.0, 0.0625]), torch.arange(128.0)
    got = w4a16_gemv(
        x, arranged(w), bias, variant=Variant(8, 1, 2, 1, 2), x_scale=scale, dtype=WIDE, early=True
    )
    assert_same_bits(got, exact_result(x.float(), w, None) * scale[:, None] + bias)


#: Rows of weights of one x and one launch, their columns, rows of x, the variant, the dtype of x; two of one shape are gated.
TOGETHER = {
    "of unlike rows, parts of K": ((128, 64, 192), 512, 3, Variant(8, 1, 3, 2, 3, 2, True), BF16),
    "gated": ((128, 128), 384, 2, Variant(8, 1, 3, 1, 3, 2, True), BF16),
    "two, two blocks, x before": ((256, 128), 256, 1, Variant(8, 2, 2, 1, 2), HALF),
    "gated, float16, two blocks": ((128, 128), 256, 9, Variant(16, 2, 1, 1, 2), HALF),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", at_night(TOGETHER, "two, two blocks, x before", "gated, float16, two blocks")
)
def test_weights_of_one_launch_have_the_bits_of_launches_of_their_own(name):
    """Silu of one product times the other is that of both rounded."""
    require_nvrtc()
    rows, length, count, variant, dtype = TOGETHER[name]
    held = [arranged(weight(named("int4_g128_asymmetric"), n, length, seed)) for seed, n in enumerate(rows)]
    x, is_gated = inputs(count, length, dtype), name.startswith("gated")
    wanted = [w4a16_gemv(x, w, variant=variant) for w in held]
    got = w4a16_gemv_of_several(x, held, variant, is_gated, seed=1)
    for one, other in zip(got, [reference.swiglu(*wanted)] if is_gated else wanted, strict=True):
        assert_same_bits(one, other)


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
    got = w4a16_gemv(x, w, variant=Variant(16, 2, 1, 1, 1, 1, True, tabled), dtype=WIDE, early=True)
    terms = torch.tensor(TERMS["float16" if dtype == HALF else "bfloat16"], dtype=torch.int32)
    hi, mid = terms.to(torch.int16).view(dtype).double().unbind(-1)
    levels = (hi + SECOND * mid).float()[codes[:, :16].long()]
    assert_same_bits(got, (levels * scale[0][:, None]).t().contiguous())


@pytest.mark.parametrize("dtype", [BF16, pytest.param(HALF, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_every_code_is_exact(element, dtype):
    """One column a row of x: the element times its row's scale, rounded once; then x's scale and the bias."""
    require_nvrtc()
    stored, codes = every_byte(128, 128, element, 0)
    scale, own = torch.rand(1, 128) + 0.5, torch.rand(16) + 0.5
    w = ArrangedWeight(layout.arranged(stored, element), scale, None, (128, 128), element, 0)
    x, bias = torch.eye(16, 128, dtype=dtype), torch.rand(128)
    got = w4a16_gemv(x, w, bias, variant=Direct(16, 4, 2, 2), dtype=WIDE, x_scale=own, early=True)
    values = codes.view(torch.int8) if element == "int8" else codes.view(torch.float8_e4m3fn)
    wanted = (values.float() * scale.t()).t()[:16] * own[:, None] + bias
    assert_same_bits(got, wanted)


@pytest.mark.parametrize(
    ("scheme", "variant"),
    [(scheme, Variant(16, 2, 1, 1, 1, 1, True)) for scheme in ("mxfp4", "nvfp4", "mxfp8_e4m3")]
    + [("mxfp8_e4m3", Direct(16, 4, 2, 2))],
)
def test_every_code_is_exact_under_its_factor(scheme, variant):
    """The weight's own scale, too."""
    require_nvrtc()
    w = exact_weight(named(scheme), 128, 128)
    w.codes[:] = every_byte(128, 128, *form_of(w.scheme, 128))[0]
    x, held, own = torch.eye(16, 128, dtype=BF16), arranged(w), 1.0
    if isinstance(variant, Direct):
        held.scale.view(torch.float32)[0] = own = 2.0
    got = w4a16_gemv(x, held, variant=variant, dtype=WIDE, early=True)
    assert_same_bits(got, exact_result(x.float(), w, None) * own)


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
    w4a16_gemv(x, arranged(w), variant=Variant(8, 2, 1, 1, 1, 1, True, 4), early=True)
    assert seen == {(lane, 8 * lane) for lane in range(16)}


def sums(early, change):
    """Exact ones, of four stages of two."""
    w, x = exact_weight(named("int4_g128_asymmetric"), 128, 1024), exact_inputs(3, 1024, BF16)
    return w4a16_gemv(x, arranged(w), variant=Variant(8, 1, 2, 1, 2), early=early, seed=3, change=change)


def sums_of_levels(early, change):
    """Two stages, of which one is loaded twice; NF4, random values."""
    w, x, one = weight(named("nf4"), 128, 768), inputs(3, 768, BF16), Variant(8, 2, 1, 1, 2, 1, True, 2)
    return w4a16_gemv(x, arranged(w), variant=one, dtype=WIDE, early=early, seed=3, change=change)


def sums_of_factors(early, change):
    """Straight from memory, four pieces of x; MXFP8, random values, a scale of the weight's own."""
    w, x = weight(named("mxfp8_e4m3"), 128, 512), inputs(2, 512, BF16)
    held = arranged(w)
    held.scale.view(torch.float32)[0] = 2.0
    return w4a16_gemv(x, held, variant=Direct(8, 4, 2, 2), dtype=WIDE, early=early, seed=3, change=change)


def sums_of_two(early, change):
    """Silu of one product times the other."""
    held = [arranged(weight(named("int4_g128_asymmetric"), 64, 384, seed)) for seed in (0, 1)]
    x, one = inputs(2, 384, BF16), Variant(8, 1, 3, 1, 3, 2, True)
    return w4a16_gemv_of_several(x, held, one, True, early=early, seed=3, change=change)[0]


WAIT = "wait_for(ring.empty + 8 * stage, (i / STAGES & 1) ^ 1);"
#: A fault, and what is changed, by what shows it.
FAULTS = {
    sums: {
        "a stage is handed back before it is read": (
            "    wait_for(ring.full + 8 * stage, i / STAGES & 1);\n", ""),
        "a stage is loaded before it is handed back": (
            "    wait_for(ring.empty + 8 * stage, (i / STAGES & 1) ^ 1);\n", ""),
        "x is read before it is there": ("cp.async.wait_all;", ""),
        "sums are added before all are there": ("  sync_cluster();\n  if (warp < WARPS) finish", "  if (warp < WARPS) finish"),
        "columns in another order": ("half ? w.z : w.x", "half ? w.x : w.z"),
        "the other row's scale": ("i < 2 ? low : high", "i < 2 ? high : low"),
        "zero points of the other row": ("i % 2 ? less.high : less.low", "i % 2 ? less.low : less.high"),
    },
    sums_of_two: {
        "up is the gate": ("total_of<1, 2>", "total_of<0, 1>"),
        "a product is not rounded": (
            "narrowed(total_of<1, 2>(ring, token, at))", "__float_as_uint(total_of<1, 2>(ring, token, at)) >> 16"),
        "both programs write the first half": ("place * SHARE + i % SHARE", "i % SHARE"),
        "zero points of the gate": (", p.zero = all.more[i].zero", ""),
    },
    sums_of_levels: {
        "x is read before it is there": ("STREAMED ? 33 : 1", "1"),
        "x is copied over what is read": (f"    {WAIT}\n#pragma unroll 4", "#pragma unroll 4"),
        "x of another stage": ("STREAMED ? begin + j", "STREAMED ? ring.stages + j"),
        "a table of other bytes": ("i / (COPIES / 2), 0)", "i / (COPIES / 2) + 1, 0)"),
        "the other row's level": ("load_levels(low, table, word, 0)", "load_levels(low, table, word, 1)"),
        "the second term is left out": ("fmaf(sums[0][t][i + 2], SECOND", "fmaf(sums[0][t][i + 2], 0.f"),
        "highest bits of other codes": ("0xFBD9u : 0xEAC8u", "0xEAC8u : 0xFBD9u"),
        "the first group's scale": ("places, scale + group * SCALE_BYTES", "places, scale"),
    },
    sums_of_factors: {
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
    },
}  # fmt: skip


@pytest.mark.parametrize(("product", "fault"), by_product(FAULTS))
def test_planted_faults_are_seen(product, fault):
    require_nvrtc()
    assert_shown(FAULTS[product][fault], product)
