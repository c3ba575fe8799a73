"""Fake quantization: the bits of storage, straight-through gradients, gradients of given scales; stretched levels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ao_lab
import fast
import reference
from ao_lab import QATConfig, explain, quantize_
from ao_lab.qat.layers import raised
from reference import SCHEMES, Scales
from reference.formats.formats import FORMATS
from tests.support.models.qat_models import same
from tests.support.record_samples import STRUCTURES, covering, kinds_of, sampled
from tests.support.refusals import refused

RNG = np.random.default_rng(0)
X = (RNG.standard_normal((16, 1024)) * np.exp(RNG.standard_normal((16, 1)))).astype(np.float32)
# One of every structure: tensor, row, block, tile, e8m0, two levels, zero points of both kinds, codebook, encoding scale.
KINDS = [
    "fp8_tensorwise", "fp8_rowwise", "fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp4", "mxint8", "nvfp4", "int8_rowwise",
    "int8_rowwise_asymmetric", "int4_g32", "int4_g32_asymmetric", "nf4", "torchao.int4_g32_tinygemm",
    "torchao.fp8_rowwise_training", "te.nvfp4",
]  # fmt: skip


@pytest.mark.parametrize("name", sampled(STRUCTURES))
def test_value_is_quantize_then_dequantize(name):
    for dtype in ("float32", "bfloat16"):
        x = torch.from_numpy(X).to(getattr(torch, dtype))
        result = reference.fake_quantize(x, name)
        stored = reference.dequantize(reference.quantize(x, name), dtype)
        assert result.dtype == x.dtype
        assert torch.equal(result.view(torch.uint8), stored.view(torch.uint8))


def rounded_without_saturation(x, scale, mantissa_bits, emin):
    """x / scale rounded to a float grid without an upper end, in float64 (exact for the powers of two used here)."""
    t = x.astype(np.float64) / scale
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(t), 1e-300))), emin)
    unit = np.exp2(exponent - mantissa_bits)
    return np.round(t / unit) * unit


def test_gradient_is_zero_exactly_where_saturation_changed_the_value():
    """MXFP8 with floor scales: elements whose rounded value exceeds 448 lose their gradient, others keep it."""
    x = X.copy()
    x[0, :8] = [511, 449, 460, 464, 464.1, 479, -500, 448]
    q = reference.quantize(x, "mxfp8_e4m3")
    scale = np.repeat(reference.decode(q.scale, "float8_e8m0fnu").astype(np.float64), 32, axis=1)
    expected = np.abs(rounded_without_saturation(x, scale, 3, -6)) <= 448
    g = RNG.standard_normal(X.shape).astype(np.float32)
    dx, dscale, dzero = reference.fake_quantize_vjp(g, x, "mxfp8_e4m3")
    assert dscale is None and dzero is None  # noqa: PT018
    assert 0 < (~expected).sum() < expected.size
    assert np.array_equal(dx, np.where(expected, g, 0))


@pytest.mark.parametrize("name", KINDS)
def test_scales_computed_from_x_let_nothing_saturate_but_floor(name):
    dx, _, _ = reference.fake_quantize_vjp(np.ones_like(X), X, name)
    lossless = name not in ("mxfp8_e4m3", "mxfp4", "mxint8")
    assert bool((dx == 1).all()) or not lossless


@given(scale=st.sampled_from([2.0**-3, 2.0**-5, 2.0**-7]), seed=st.integers(0, 2**32 - 1))
def test_learned_integer_scale(scale, seed):
    """Learned step size quantization, equation 3, for int8 rows, in float64 with exact sums."""
    x = np.round(np.random.default_rng(seed).standard_normal((2, 64)) * 2**10).astype(np.float32) / 2**10
    given_scale = np.full((2, 1), scale, np.float32)
    dx, dscale, dzero = reference.fake_quantize_vjp(np.ones_like(x), x, "int8_rowwise", scales=given_scale)
    ratio = x.astype(np.float64) / scale
    inside = (np.round(ratio) >= -128) & (np.round(ratio) <= 127)
    slope = np.where(inside, np.round(ratio) - ratio, np.where(ratio > 0, 127, -128))
    assert np.array_equal(dx, inside.astype(np.float32))
    assert np.array_equal(dscale[:, 0], slope.sum(axis=1).astype(np.float32))
    assert dzero is None


def test_learned_zero_point():
    """Asymmetric: -s per saturated element, nothing elsewhere; the scale's slope counts codes less the zero point."""
    x = np.array([[-1.0, 0.5, 3.0, 40.0]], np.float32)
    record = replace(
        SCHEMES["int4_g32_asymmetric"], scale=replace(SCHEMES["int4_g32_asymmetric"].scale, block=4)
    )
    scales = Scales(np.array([[0.5]], np.float32), None, np.array([[-2]], np.int8))
    dx, dscale, dzero = reference.fake_quantize_vjp(np.ones_like(x), x, record, scales=scales)
    # x / s + z = -4, -1, 4, 78: only the last leaves -8 .. 7.
    assert dx.tolist() == [[1, 1, 1, 0]]
    assert dscale.tolist() == [[9.0]]
    assert dzero.tolist() == [[-0.5]]


def test_short_last_block_counts_each_element_once():
    x = np.full((1, 130), 1000.0, np.float32)
    scales = np.ones((1, 2), np.float32)
    _, dscale, _ = reference.fake_quantize_vjp(np.ones_like(x), x, "fp8_1x128", scales=scales)
    assert dscale.tolist() == [[448.0 * 128, 448.0 * 2]]
    tile = np.ones((2, 2), np.float32)
    _, dscale, _ = reference.fake_quantize_vjp(np.ones((130, 130), np.float32), np.full((130, 130), 1e3, np.float32),
                                               "fp8_128x128", scales=tile)  # fmt: skip
    assert dscale.tolist() == [[448.0 * 128 * 128, 448.0 * 256], [448.0 * 256, 448.0 * 4]]


# XLA compiles for seconds: by day tiles, groups, two levels and zero points of both kinds; codebooks and tensors at night.
BY_DAY = {"fp8_128x128", "int8_rowwise_asymmetric", "mxfp8_e4m3", "nvfp4", "torchao.int4_g32_tinygemm"}


@pytest.mark.parametrize("name", sampled(BY_DAY, KINDS))
def test_libraries_agree_on_gradients(name):
    import jax
    import jax.numpy as jnp

    g = RNG.standard_normal(X.shape).astype(np.float32)
    x, g = X[:4, :128], g[:4, :128]
    scales = reference.choose_scales(x / 2, name)
    expected = reference.fake_quantize_vjp(g, x, name, scales=scales)
    reference.register_jax()
    jax_scales = jax.tree_util.tree_map(jnp.asarray, scales)
    in_jax = jax.jit(lambda a, b, s: reference.fake_quantize_vjp(a, b, name, scales=s))(
        g, jnp.asarray(x), jax_scales
    )
    for ours, theirs in zip(in_jax, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("name", sampled({"mxfp4", "int8_rowwise"}, ["mxfp4", "int8_rowwise", "nvfp4"]))
def test_jax_grad_is_the_vjp_under_jit_and_vmap(name):
    import jax
    import jax.numpy as jnp

    def loss(v):
        return (reference.fake_quantize(v, name) * jnp.arange(1024.0)).sum()

    weights = np.broadcast_to(np.arange(1024, dtype=np.float32), X.shape)
    expected, _, _ = reference.fake_quantize_vjp(np.ascontiguousarray(weights), X, name)
    assert np.array_equal(np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(X))), expected)
    batched = jax.jit(jax.vmap(jax.grad(loss)))(jnp.asarray(X)[:, None, :])
    per_row = [reference.fake_quantize_vjp(weights[:1].copy(), row[None], name)[0] for row in X]
    assert np.array_equal(np.asarray(batched), np.stack(per_row))


STOCHASTIC = ["mxfp4", "mxint8", "fp8_rowwise", "nvfp4", "int8_rowwise_asymmetric", "int4_g32"]
WORDS = reference.random_bits(X.shape, seed=5)


def stochastic(name):
    return replace(SCHEMES[name], name=f"{name}_stochastic", rounding="stochastic")


@pytest.mark.parametrize("name", sampled(covering(kinds_of, STOCHASTIC), STOCHASTIC))
def test_stochastic_values_are_those_of_storage_in_every_library(name):
    import jax.numpy as jnp

    record = stochastic(name)
    stored = reference.dequantize(reference.quantize(X, record, random_bits=WORDS))
    assert (stored != reference.dequantize(reference.quantize(X, name))).any()
    for convert in (np.asarray, lambda array: torch.from_numpy(array.copy()), jnp.asarray):
        result = reference.fake_quantize(convert(X), record, random_bits=convert(WORDS))
        assert np.asarray(result).tobytes() == stored.tobytes()
    plain = reference.fake_quantize.__wrapped__(
        torch.from_numpy(X), record, random_bits=torch.from_numpy(WORDS)
    )
    assert plain.numpy().tobytes() == stored.tobytes()


def test_stochastic_saturation_is_that_of_the_rounded_element():
    """At scale 1 the next number after 448 would be 480: 464 goes there with the words of the upper half, and saturates."""
    x = np.full((1, 4), 464, np.float32)
    x[0, 2:] = [448, 480]
    scales, g = np.ones((1, 1), np.float32), np.ones((1, 4), np.float32)
    for word, kept in ((0x7FFFFFFF, [1, 1, 1, 0]), (0x80000000, [0, 0, 1, 0]), (0, [1, 1, 1, 0])):
        words = np.full((1, 4), word, np.uint32)
        options = {"scales": scales, "random_bits": words}
        dx, dscale, _ = reference.fake_quantize_vjp(g, x, stochastic("fp8_rowwise"), **options)
        assert dx.tolist() == [kept]
        assert reference.fake_quantize(x, stochastic("fp8_rowwise"), **options).tolist() == [[448] * 4]
        # The slope is v where the element saturated, else v - x.
        assert dscale.tolist() == [[sum(448 - x[0, i] * kept[i] for i in range(4))]]


@pytest.mark.parametrize("name", sampled(covering(kinds_of, STOCHASTIC), STOCHASTIC))
def test_stochastic_gradients_in_every_library(name):
    import jax
    import jax.numpy as jnp

    record, x, words = stochastic(name), X[:4, :128], WORDS[:4, :128].copy()
    g = RNG.standard_normal(x.shape).astype(np.float32)
    scales = reference.choose_scales(x / 2, record)
    expected = reference.fake_quantize_vjp(g, x, record, scales=scales, random_bits=words)
    assert (expected[0] == 0).any()
    tensors = [torch.from_numpy(array.copy()) for array in (g, x, words)]
    tensor_scales = Scales(*(None if part is None else torch.from_numpy(np.array(part))
                             for part in (scales.scale, scales.outer, scales.zero)))  # fmt: skip
    in_torch = reference.fake_quantize_vjp.__wrapped__(
        *tensors[:2], record, scales=tensor_scales, random_bits=tensors[2]
    )
    in_jax = jax.jit(lambda a, b, s, w: reference.fake_quantize_vjp(a, b, record, scales=s, random_bits=w))(
        g, x, jax.tree.map(jnp.asarray, scales), words
    )
    for result in (in_torch, in_jax):
        for ours, theirs in zip(result, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("name", sampled({"mxfp4"}, ["mxfp4", "nvfp4"]))
def test_jax_grad_of_a_stochastic_record(name):
    """custom_vjp under jit and vmap; the random words have no gradient."""
    import jax
    import jax.numpy as jnp

    record = stochastic(name)

    def loss(v, words):
        return (reference.fake_quantize(v, record, random_bits=words) * jnp.arange(1024.0)).sum()

    weights = np.broadcast_to(np.arange(1024, dtype=np.float32), X.shape)
    expected, _, _ = reference.fake_quantize_vjp(np.ascontiguousarray(weights), X, record, random_bits=WORDS)
    gradient = jax.jit(jax.grad(loss))(jnp.asarray(X), jnp.asarray(WORDS))
    assert np.array_equal(np.asarray(gradient), expected)
    batched = jax.jit(jax.vmap(jax.grad(loss)))(jnp.asarray(X)[:, None, :], jnp.asarray(WORDS)[:, None, :])
    for i, row in enumerate(X):
        options = {"random_bits": WORDS[i : i + 1].copy()}
        one, _, _ = reference.fake_quantize_vjp(weights[:1].copy(), row[None], record, **options)
        assert np.array_equal(np.asarray(batched[i]), one)


def test_torch_autograd_is_the_vjp():
    x = torch.from_numpy(X.copy()).requires_grad_()
    scale = torch.full((16, 1), 2.0**-6, requires_grad=True)
    y = fast.fake_quantize(x, "int8_rowwise", scales=scale)
    g = torch.randn_like(y)
    y.backward(g)
    dx, dscale, _ = reference.fake_quantize_vjp(g, x.detach(), "int8_rowwise", scales=scale.detach())
    assert torch.equal(x.grad, dx)
    assert torch.equal(scale.grad, dscale)
    assert y.grad_fn is not None


def test_codebook_saturates_beyond_its_ends():
    x = np.array([[0.5, 1.0, 1.01, -3.0] * 16], np.float32)
    record = replace(SCHEMES["nf4"], outer=None, scale=replace(SCHEMES["nf4"].scale, storage="float32"))
    dx, _, _ = reference.fake_quantize_vjp(np.ones_like(x), x, record, scales=np.ones(1, np.float32))
    assert dx[0, :4].tolist() == [1, 1, 0, 0]
    assert FORMATS["nf4"].max == 1.0


def test_empty_and_wrong_gradients():
    empty = np.zeros((0, 64), np.float32)
    assert reference.fake_quantize(empty, "mxfp8_e4m3").shape == (0, 64)
    with pytest.raises(ValueError, match=r"shape of x, float32 \(16, 1024\)"):
        reference.fake_quantize_vjp(np.ones((16, 1), np.float32), X, "mxfp8_e4m3")
    refused(ValueError, "float16", reference.fake_quantize_vjp, X.astype(np.float16), X, "mxfp8_e4m3")
    refused(TypeError, r"fast\.fake_quantize takes torch tensors", fast.fake_quantize, X, "mxfp8_e4m3")


# Stretched levels against ParetoQ's formula (arXiv 2502.02631), their gradients against autograd, and their edges.

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
    # The kernel whose sums are those of the fake quantized layer.
    config = ao_lab.LowBitWeightOnlyConfig(bits=bits, granularity=granularity, kernel="dequantize")
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
