"""The kernel's PTX in the emulator: codes and scales of x as `quantize` has them, exact products, all codes, planted faults."""

import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.fp8_skinny.variants import Variant
from tests.fast.kernels.fp8_skinny.emulated import product
from tests.fast.kernels.sparse_mm.examples import require_nvrtc

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
#: Rows of x, rows and columns of the weight; the variant.
CASES = {
    "one row": ((1, 64, 512), Variant(8, 2, 2, 2, kept=1)),
    "phases of unlike lengths, 5 rows": ((5, 32, 1280), Variant(8, 1, 3, 2, True, True, 9)),
    "16 rows": ((16, 48, 512), Variant(16, 3, 2, 1)),
    "fewer turns than places": ((9, 16, 256), Variant(16, 1, 2, 3, True)),
    "codes of 11 rows": ((11, 32, 768), Variant(16, 2, 2, 1, False, True)),
}


def drawn(count, n, k, seed=0):
    """Integers whose sums are exact in float32: rows of x have 7 as their largest, so that codes are 64 times they."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (count, k), generator=draw).float()
    x[:, 5] = 7 * (-1) ** torch.arange(count)
    w = torch.randint(-8, 9, (n, k), generator=draw).float()
    scale = 2.0 ** torch.randint(-2, 3, (n,), generator=draw).float()
    return x.to(BF16), w.to(E4M3).view(torch.uint8), scale


def wanted(x, codes, scale, bias=None):
    """Exact sums of codes, then x's scale, the weight's and the bias, each rounded to float32; to bfloat16 at the end."""
    q = reference.quantize(x, "fp8_rowwise", axis=-1)
    sums = (q.codes.view(E4M3).double() @ codes.view(E4M3).double().t()).float()
    y = sums * q.scale.view(-1, 1) * scale
    return (y if bias is None else y + bias.float()).to(BF16)


def multiplied(x, *rest, variant, **options):
    """By codes of x where the variant does not quantize."""
    if variant.kept:
        return product(x, *rest, variant=variant, **options)
    q = reference.quantize(x, "fp8_rowwise", axis=-1)
    return product(q.codes, *rest, variant=variant, x_scale=q.scale, **options)


@pytest.mark.parametrize("name", CASES)
def test_variants_give_exact_sums(name):
    require_nvrtc()
    (count, n, k), variant = CASES[name]
    x, codes, scale = drawn(count, n, k)
    bias = torch.arange(n).to(BF16) % 7 - 3
    got = multiplied(x, codes, scale, bias, variant=variant, seed=1)
    assert_same_bits(got, wanted(x, codes, scale, bias))


def test_every_code_is_exact():
    """One column a row of x: codes of e4m3, NaN among them, times 448 and both scales."""
    require_nvrtc()
    codes = torch.zeros(16, 256, dtype=torch.uint8)
    codes[:, :16] = torch.arange(256).view(16, 16)
    scale = torch.rand(16) + 0.5
    got = product(torch.eye(16, 256, dtype=BF16) * 3, codes, scale, variant=Variant(16, 1, 2, 1, kept=8))
    # A product of 0 and NaN is NaN, and so are all of a row of the weight with one.
    values = codes[:, :16].t().contiguous().view(E4M3).float()
    values[:, values.isnan().any(0)] = torch.nan
    expected = (values * 448 * (torch.tensor(3.0) / 448) * scale).to(BF16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])


def test_inputs_are_rounded_as_quantize_rounds_them():
    """Each column of x by an identity, rows of all magnitudes, subnormal ones, zeros, infinities and NaN."""
    require_nvrtc()
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(16, 256, generator=draw) * 2.0 ** torch.linspace(-130, 120, 16).round()[:, None]
    x[3], x[5, 7], x[6, 9], x[7] = 0.0, torch.inf, torch.nan, 2.0**-133
    x = x.to(BF16)
    q = reference.quantize(x, "fp8_rowwise", axis=-1)
    codes = torch.zeros(256, 256)
    codes.fill_diagonal_(1.0)
    got = product(x, codes.to(E4M3).view(torch.uint8), torch.ones(256), variant=Variant(16, 4, 2, 1, kept=2))
    values = (q.codes.view(E4M3).float() * q.scale.view(-1, 1)).to(BF16)
    assert bool((got.isnan() == q.scale.view(-1, 1).isnan()).all())
    finite = ~got.isnan()
    # A sum has no negative zero.
    assert torch.equal(got[finite], values[finite])


def test_bias_in_other_dtypes():
    require_nvrtc()
    x, codes, scale = drawn(2, 16, 256)
    for dtype in (torch.float32, torch.float16):
        bias = (torch.arange(16) % 5 - 2).to(dtype)
        assert_same_bits(
            product(x, codes, scale, bias, variant=Variant(8, 1, 2, 1, kept=1)), wanted(x, codes, scale, bias)
        )


FAULTS = {
    "sums are added before all are there": ("  meet_all();\n  finish", "  finish"),
    "scales before all have looked": ("    meet_all();\n    pieces.leave", "    pieces.leave"),
    "codes before all are there": ("  meet_all();\n  u32 x[TILES]", "  u32 x[TILES]"),
    "a phase is left out": ("int phase = 0; phase < PHASES", "int phase = 1; phase < PHASES"),
    "a turn too soon": ("from.load(j, i + EACH, half)", "from.load(j, i + EACH - 1, half)"),
    "a turn of no one": ("if (i >= turns) return;", "if (i > turns) return;"),
    "both halves are the first": ("+ half * 64;", ";"),
    "x's first half twice": ("PHASES * TURN + half * 64)", "PHASES * TURN)"),
    "the row above": ("high[j][half] = load_stream(at)", "high[j][half] = load_stream(at + lower)"),
    "columns in another order": ("halves_of(b0, b1, words[i])", "halves_of(b1, b0, words[i])"),
    "another row's scale": ("scale_of(load_word(largest + 4 * token)) : p", "scale_of(load_word(largest)) : p"),
    "another row of x": ("min(8 * t + lane / 4, p.count - 1)", "min(8 * t + lane % 4, p.count - 1)"),
    "a lane's piece": ("PIECE + lane * 8", "PIECE + lane * 4"),
    "the largest of half of a pair": ("max(pair >> 16, pair & 0xFFFFu)", "pair & 0xFFFFu"),
}  # fmt: skip
OF_CODES = {
    "codes of x are read before they came": ('    asm volatile("cp.async.wait_all;" ::: "memory");\n', ""),
    "another row's scale of codes": ("p.x_scale[token]", "p.x_scale[0]"),
    "a row of codes in another's place": ("i / each * pitch + i % each", "i / each * (pitch + 16) + i % each"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [*FAULTS, *OF_CODES])
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    x, codes, scale = drawn(3, 32, 1280)
    x[1] *= 4
    expected = wanted(x, codes, scale)

    kept = 0 if fault in OF_CODES else 4
    given = {"variant": Variant(8, 2, 2, 2, kept=kept), "swap": {**FAULTS, **OF_CODES}[fault]}

    def seen(seed):
        try:
            return not torch.equal(multiplied(x, codes, scale, seed=seed, **given), expected)
        except (RuntimeError, ValueError, IndexError, KeyError):
            return True

    assert any(seen(seed) for seed in range(3))
