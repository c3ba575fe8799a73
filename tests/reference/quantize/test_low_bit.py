"""Stretched levels against ParetoQ's formula (arXiv 2502.02631), their gradients against autograd, and their edges."""

import pytest
import torch
from torch import nn

import ao_lab
import fast
from ao_lab import QATConfig, explain, quantize_
from ao_lab.qat.layers import raised
from reference import SCHEMES, Scales
from tests.support.models.qat_models import same

#: Levels and the shift that centres them.
LEVELS = {"ternary": (3, 0.0), "stretched2": (4, 0.5)}


def published(w, alpha, levels, shift):
    """alpha * (round(clip(w / alpha, -1, 1) * k / 2 - shift) + shift) * 2 / k, the codes within the k that there are."""
    half = levels / 2
    code = torch.round((w / alpha).clamp(-1, 1) * half - shift) + shift
    return alpha * code.clamp(0.5 - half, half - 0.5) / half


def weights(seed=0):
    """Float32 rows of different sizes, none of them exactly zero."""
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
    return rows * 2.0 ** torch.arange(-3, 3)[:, None]


@pytest.mark.parametrize("element", LEVELS)
def test_values_are_those_of_the_formula(element):
    """Scales found from the data are those that the paper starts with: alpha is the largest magnitude of its row."""
    levels, shift = LEVELS[element]
    w, scheme = weights(), SCHEMES[f"{element}_rowwise"]
    alpha = w.abs().amax(1, keepdim=True)
    assert same(fast.choose_scales(w, scheme).scale, alpha / (levels / 2))
    wanted = published(w.double(), alpha.double(), levels, shift)
    torch.testing.assert_close(fast.fake_quantize(w, scheme).double(), wanted, rtol=2**-22, atol=0)


@pytest.mark.parametrize("element", LEVELS)
def test_every_interval_has_one_width(element):
    """On an even grid each level is taken equally often: what stretching is for."""
    levels, _ = LEVELS[element]
    grid = (torch.arange(levels * 64, dtype=torch.float32) + 0.5) / (levels * 64) * 2 - 1
    scales = Scales(torch.full((1, 1), 2 / levels))
    result = fast.fake_quantize(grid[None], SCHEMES[f"{element}_rowwise"], scales=scales)
    assert result.unique(return_counts=True)[1].tolist() == [64] * levels


@pytest.mark.parametrize("element", LEVELS)
def test_gradients_of_learned_scales_are_those_of_autograd(element):
    """Numbers with few bits and a scale of a power of two: every product and sum is exact, so that bits are compared."""
    levels, shift = LEVELS[element]
    generator = torch.Generator().manual_seed(1)
    w = (torch.randint(-200, 200, (4, 32), generator=generator) * 2 + 1) / 64.0
    g = torch.randint(-8, 8, (4, 32), generator=generator) / 8.0
    s = torch.tensor([[0.5], [1.0], [1.0], [2.0]])
    dw, ds, _ = fast.fake_quantize_vjp(g, w, SCHEMES[f"{element}_rowwise"], scales=Scales(s))
    weight, scale = w.clone().requires_grad_(), s.clone().requires_grad_()
    ratio = weight / scale
    inside = ratio.abs() <= levels / 2
    end = (levels - 1) / 2
    level = ((ratio - shift).round() + shift).clamp(-end, end).detach()
    y = scale * torch.where(inside, ratio + (level - ratio).detach(), level)
    y.backward(g)
    assert inside.any()
    assert not inside.all()
    assert same(dw, weight.grad)
    # Autograd adds what a weight's gradient takes from the scale's; both sums are exact.
    assert same(ds, scale.grad)


def test_the_outermost_interval_passes_gradients():
    """Beyond the last level, up to the end of its interval, nothing saturates."""
    w, g = torch.tensor([[1.6, -1.9, 2.1, 0.1]]), torch.ones(1, 4)
    result = fast.fake_quantize_vjp(g, w, "stretched2_rowwise", scales=Scales(torch.ones(1, 1)))[0]
    assert result.tolist() == [[1, 1, 0, 1]]
    result = fast.fake_quantize_vjp(g, w, "ternary_rowwise", scales=Scales(torch.ones(1, 1)))[0]
    assert result.tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("element", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_edges(element, dtype):
    """Zeros, NaN, infinities: a block of zeros is zero, or, where there is no zero, as small as its scale."""
    x = torch.ones(4, 32, dtype=dtype)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    result = fast.fake_quantize(x, SCHEMES[f"{element}_g32"]).float()
    least = 0.0 if element == "ternary" else 2.0**-127
    assert (result[0].abs() <= least).all()
    assert result[1:3].isnan().all()
    assert result[3].isfinite().all()


@pytest.mark.parametrize("bits", [1.58, 2, 3, 4])
@pytest.mark.parametrize("granularity", [ao_lab.PerAxis(0), ao_lab.PerGroup(32)], ids=["rows", "groups"])
def test_trained_and_converted(bits, granularity):
    """The published recipe: learned scales, of which the high rate makes some negative; what was trained with is stored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    config = ao_lab.LowBitWeightOnlyConfig(bits=bits, granularity=granularity)
    quantize_(model, QATConfig(config, step="prepare", learn_scales=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, target = torch.randn(32, 64), torch.randn(32, 8)
    losses, start = [], model[0].qat_scale.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert not same(model[0].qat_scale.detach(), start)
    layer = model[0]
    wanted = fast.fake_quantize(
        layer.weight.detach(), config.recipe().weight, scales=Scales(raised(layer.qat_scale.detach()))
    )
    y = model(x).detach()
    quantize_(model, QATConfig(config, step="convert"))
    assert same(model[0].weight.dequantize(), wanted)
    assert same(model(x), y)
    codes = 2 if bits < 3 else bits
    assert explain(model).changed[0].bytes == 64 * 64 * codes // 8 + 4 * model[0].weight.scale.numel()
