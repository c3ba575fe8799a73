"""NF4 in the emulator: every code of every place by scales that round, levels of other codebooks, sums, and faults."""

from dataclasses import replace

import pytest
import torch

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemm.host import weight_of
from fast.kernels.sm90_w4a16_gemm.variants import Variant, Weight
from fast.matmul.preshuffled import layout
from fast.scale_factors import BLOCK
from tests.emulator.device.mixed_stand_in import MixedStandIn
from tests.emulator.faults import assert_seen, at_night, every_second
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_w4a16_gemm.test_emulated import expected, given, stored
from tests.support.linear_cases import exact_levels

BF16, F16 = torch.bfloat16, torch.float16
N, K = 128, 384
#: Variant; columns of the weight and rows of x; dtype of x; that of a bias.
CASES = {
    "ahead": (Variant(16, 1, 1, 3), (256, 19), BF16, None),
    "pairs": (Variant(32, 2, 1, 4), (384, 33), F16, BF16),
    "splits": (Variant(32, 1, 3, 3), (256, 20), BF16, torch.float32),
    "pairs, splits": (Variant(32, 2, 2, 5), (384, 40), F16, None),
    "turns": (Variant(32, 1, 1, 4, turns=2), (256, 33), BF16, BF16),
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
    return arranged(codes, scale.float(), levels), values_of(codes, scale.float(), levels)


def arranged(codes, scale, levels):
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


@pytest.mark.parametrize("name", at_night(CASES, "pairs", "splits", "pairs, splits", "small tiles"))
def test_elements_of_the_weight_are_those_of_dequantize(name):
    require_nvrtc()
    variant, (n, m), dtype, biased = CASES[name]
    w, dense = stored("nf4", n, K)
    assert weight_of(w) == Weight("nf4")
    x, bias = given(m, n, K, dtype, biased)
    found = MixedStandIn(early=name == "ahead", seed=1).multiplied(x, w, bias, variant)
    assert_same_bits(found, expected(x, dense, bias))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.nightly)])
def test_every_code_in_every_place(dtype):
    """Each column copied by a row of x."""
    require_nvrtc()
    w, dense = every_code()
    counts = torch.stack([(w.words.view(-1) >> 4 * place & 15).bincount(minlength=16) for place in range(8)])
    assert int(counts.min()) > 0
    found = MixedStandIn(early=True).multiplied(torch.eye(K, dtype=dtype), w, None, Variant(192, 1, 1, 3))
    assert_same_bits(found, dense.to(dtype).t() + 0.0)


def test_levels_are_those_of_the_weight():
    """Any 16 float32, which lie behind the scales."""
    require_nvrtc()
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (N, K // 2), generator=draw).to(torch.uint8)
    scale, levels = torch.rand(K // BLOCK, N, generator=draw), torch.randn(16, generator=draw)
    x, _ = given(16, N, K, BF16, None)
    found = MixedStandIn(early=False).multiplied(
        x, arranged(codes, scale, levels), None, Variant(16, 1, 1, 3)
    )
    assert_same_bits(found, expected(x, values_of(codes, scale, levels), None))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "variant", [Variant(32, 1, 1, 3), Variant(32, 1, 1, 4, turns=2), Variant(32, 1, 2, 3)]
)
def test_sums(early, variant):
    """Of integers, with scales that are powers of two: exact in any order."""
    require_nvrtc()
    q = exact_levels(named("nf4"), N, K)
    p = layout.preshuffled(q)
    w = ArrangedWeight(p.codes, p.scale, p.zero, p.shape, *layout.form_of(p.scheme, K))
    x = torch.randint(-2, 3, (20, K), generator=torch.Generator().manual_seed(2)).to(BF16)
    dense = values_of(
        q.codes, p.scale[: K // BLOCK].view(torch.float32), torch.tensor(q.scheme.format.values.tolist())
    )
    assert_same_bits(MixedStandIn(early=early).multiplied(x, w, None, variant), expected(x, dense, None))


def test_a_scale_that_is_nan_is_that_of_its_row():
    require_nvrtc()
    w, _ = every_code()
    scale = w.scale.clone()
    scale[2, 5] = 0x7FC00000
    x = torch.eye(K, dtype=BF16)[120:136]
    found = MixedStandIn(early=False).multiplied(x, replace(w, scale=scale), None, Variant(16, 1, 1, 3))
    assert found.isnan().nonzero().tolist() == [[row, 5] for row in range(16)]


FAULTS = {
    "levels of neighbours": ("u32(LEVEL) << 8 * r", "u32(LEVEL / 2) << 8 * r"),
    "columns the other way round": ("scaled(level_at(dot(low", "scaled(level_at(dot(high"),
    "pairs of another row": ("u32(LEVEL / 16) << 8 * r", "u32(LEVEL / 16) << 8 * (r ^ 1)"),
    "scales of another row": ("rows.scale[r % 2]", "rows.scale[r / 2]"),
    "levels of elsewhere": ("i64(p.steps) * p.features", "i64(p.steps - 1) * p.features"),
    "half of the table": ("i < TABLE_BYTES / 4", "i < TABLE_BYTES / 8"),
    "nobody waits for the table": ('asm volatile("bar.sync 9', 'if (thread < 0) asm volatile("bar.sync 9'),
    "the scales of the block before": ("scales += PARTS * p.features;", ""),
}


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_faults_are_seen(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    w, dense = every_code()
    x = torch.zeros(64, K, dtype=BF16)
    x[torch.arange(64), 6 * torch.arange(64) + torch.arange(64) % 6] = 1
    found = MixedStandIn(early=early, change=change).multiplied(x, w, None, Variant(64, 1, 1, 3))
    return torch.equal(found, expected(x, dense, None))
