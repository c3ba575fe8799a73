"""Gradients of layers in training: straight through where nothing saturated, none through scales that are not learned."""

import weakref
from dataclasses import replace
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ao_lab
import fast
from ao_lab import QATConfig, SchemeConfig, advance_qat, quantize_
from ao_lab.config.recipe import Recipe, named
from ao_lab.qat import linear
from ao_lab.qat.linear import Given, Rule, cannot_saturate, gradients
from ao_lab.testing.strategies import assert_same_bits
from reference import SCHEMES, Scales
from tests.gpu.models.qat import expected as expected_gradients
from tests.gpu.models.qat import numbers as operands
from tests.support.models.qat_models import same

#: Weight and input: rows, tiles, groups with zero points, scales that clip (e8m0 floor, e4m3), codebook, static.
PAIRS = [
    ("int8_rowwise", None),
    ("int4_g32", "int8_rowwise_asymmetric"),
    ("int4_g32_asymmetric", None),
    ("int1_g32", None),
    ("fp8_128x128", "fp8_1x128"),
    ("mxfp4", "mxfp8_e4m3"),
    ("nvfp4", "nvfp4"),
    ("nf4", None),
    ("ternary_g32", None),
    ("stretched2_rowwise", None),
    ("torchao.int4_g32", "torchao.int8_rowwise_asymmetric"),
    ("torchao.fp8_rowwise_training", "torchao.fp8_rowwise_training"),
]
DTYPES = (torch.float32, torch.bfloat16)


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(config, dtype=torch.float32, **options):
    layer = nn.Linear(128, 128, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(numbers(128, 128, seed=1))
    model = nn.Sequential(layer)
    quantize_(model, QATConfig(config, **options))
    return model[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_straight_through(weight, activation, dtype):
    layer = layer_of(SchemeConfig(scheme=weight, activation_scheme=activation), dtype)
    recipe = layer.qat.recipe
    x, g = numbers(6, 128, dtype=dtype).requires_grad_(), numbers(6, 128, seed=2, dtype=dtype)
    layer(x).backward(g)
    w = layer.weight.detach()
    dense = fast.fake_quantize(w, recipe.weight)
    rows, dx = x.detach(), g @ dense
    if activation is not None:
        dx = fast.fake_quantize_vjp(dx, rows, recipe.activation)[0]
        rows = fast.fake_quantize(rows, recipe.activation)
    assert same(x.grad, dx)
    assert same(layer.weight.grad, fast.fake_quantize_vjp(g.t() @ rows, w, recipe.weight)[0])
    assert same(layer.bias.grad, g.sum(0))


@pytest.mark.parametrize("weight", ["int4_g32", "mxfp8_e4m3", "int4_g32_asymmetric"])
def test_embedding_gradients_add_up(weight):
    table = nn.Embedding(8, 64, padding_idx=3)
    model = nn.Sequential(table)
    quantize_(model, QATConfig(SchemeConfig(scheme=weight)), lambda module, name: module is table)
    tokens, g = torch.tensor([1, 1, 3, 7, 0]), torch.ones(5, 64)
    table(tokens).backward(g)
    sums = torch.zeros(8, 64).index_add_(0, tokens, g)
    sums[3] = 0
    assert same(
        table.weight.grad, fast.fake_quantize_vjp(sums, table.weight.detach(), table.qat.recipe.weight)[0]
    )


SAFE = sorted(name for name, scheme in SCHEMES.items() if cannot_saturate(scheme))


@given(
    st.sampled_from(SAFE),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
    st.floats(-140, 120),
)
def test_what_cannot_saturate_does_not(name, dtype, seed, exponent):
    """Every finite block, subnormal ones and those of one large element included: the gradient is passed on whole."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 256, generator=generator) * torch.exp2(8 * torch.randn(4, 256, generator=generator))
    x = (x * 2.0 ** (exponent / 2) * 2.0 ** (exponent / 2)).clamp(-3e38, 3e38).to(dtype)
    g = torch.ones(4, 256, dtype=dtype)
    assert same(fast.fake_quantize_vjp(g, x, name)[0], g)


def test_those_that_may_saturate_are_known():
    for name in ("mxfp4", "nvfp4", "int8_rowwise_asymmetric", "nf4", "torchao.int4_g32", "mxint8"):
        assert name not in SAFE
    assert {"int4_g32", "int8_rowwise", "fp8_rowwise", "fp8_tensorwise"} <= set(SAFE)
    scale = replace(SCHEMES["int4_g32"].scale, target=7.5)
    assert not cannot_saturate(replace(SCHEMES["int4_g32"], name="clipping", scale=scale))
    asymmetric = SCHEMES["int4_g32_asymmetric"]
    scale = replace(asymmetric.scale, statistic="absmax", target=7.0)
    assert not cannot_saturate(replace(asymmetric, name="shifted", scale=scale, deviations=("clips",)))


def test_the_gradient_of_an_inputs_scale_adds_up_over_parts_of_a_batch():
    """The factor counts features (Esser et al., section 2.2), so that accumulated gradients are those of the whole."""
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.01)
    layer, plain = (layer_of(config, learn_scales=True, scale_gradient=rule) for rule in ("lsq", "sum"))
    x = numbers(8, 128)
    for part in x.split(2):
        layer(part).sum().backward()
    plain(x).sum().backward()
    whole = plain.qat_input_scale.grad / sqrt(128 * layer.qat.recipe.activation.format.max)
    assert float(layer.qat_input_scale.grad) == pytest.approx(float(whole), rel=1e-5)


@pytest.mark.parametrize("rule", ["lsq", "sum"])
@pytest.mark.parametrize(
    "weight",
    [
        "int8_rowwise",
        "int4_g32",
        "int8_tensorwise",
        "int4_g32_asymmetric",
        "int1_g32",
        "ternary_rowwise",
        "stretched2_g32",
    ],
)
def test_learned_scales(weight, rule):
    config = SchemeConfig(scheme=weight)
    layer = layer_of(config, learn_scales=True, scale_gradient=rule)
    scheme, w = layer.qat.recipe.weight, layer.weight.detach().clone()
    first = fast.choose_scales(w, scheme)
    assert same(layer.qat_scale.detach(), first.scale)
    with torch.no_grad():
        layer.qat_scale.mul_(0.8)
    scales = Scales(layer.qat_scale.detach().clone(), None, first.zero)
    x, g = numbers(6, 128), numbers(6, 128, seed=2)
    y = layer(x)
    assert same(y.detach(), nn.functional.linear(x, fast.fake_quantize(w, scheme, scales=scales), layer.bias))
    y.backward(g)
    dw, dscale, dzero = fast.fake_quantize_vjp(g.t() @ x, w, scheme, scales=scales)
    per_scale = w.numel() / first.scale.numel()
    factor = 1.0 if rule == "sum" else 1 / sqrt(per_scale * scheme.format.max)
    assert same(layer.weight.grad, dw)
    assert same(layer.qat_scale.grad, dscale * factor)
    # Codes of two levels stretch half a step beyond either.
    assert (dw == 0).any() or weight == "int1_g32"
    learned_zero = isinstance(getattr(layer, "qat_zero", None), nn.Parameter)
    assert learned_zero == (scheme.zero is not None and scheme.zero.rule == "value")
    if learned_zero:
        assert same(layer.qat_zero.grad, dzero)
    model = nn.Sequential(layer)
    quantize_(model, QATConfig(config, step="convert"))
    assert same(model[0].weight.scale, scales.scale)
    assert same(model[0].weight.dequantize(), fast.fake_quantize(w, scheme, scales=scales))


def test_learned_scale_of_static_inputs():
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.01)
    layer = layer_of(config, learn_scales=True, scale_gradient="sum")
    x, g = numbers(6, 128).requires_grad_(), numbers(6, 128, seed=2)
    layer(x).backward(g)
    recipe, w = layer.qat.recipe, layer.weight.detach()
    dense = fast.fake_quantize(w, recipe.weight, scales=Scales(layer.qat_scale.detach()))
    scales = Scales(torch.tensor(0.01))
    dx, dscale, _ = fast.fake_quantize_vjp(g @ dense, x.detach(), recipe.activation, scales=scales)
    assert same(x.grad, dx)
    assert same(layer.qat_input_scale.grad, dscale)
    with torch.no_grad():
        layer.qat_input_scale.fill_(0.02)
    model = nn.Sequential(layer)
    quantize_(model, QATConfig(config, step="convert"))
    assert float(model[0].weight.input_scale) == pytest.approx(0.02)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("learn", [False, True])
def test_delayed_start(learn):
    config = SchemeConfig(scheme="mxfp4", activation_scheme="mxfp4")
    config = ao_lab.Int8WeightOnlyConfig() if learn else config
    layer = layer_of(config, start_step=2, learn_scales=learn)
    model = nn.Sequential(layer)
    plain = nn.Linear(128, 128)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x, g = numbers(6, 128).requires_grad_(), numbers(6, 128, seed=2)
    for _ in range(2):
        layer(x).backward(g)
        dx, x.grad = x.grad, None
        plain(x).backward(g)
        assert same(layer(x), plain(x))
        assert same(layer.weight.grad, plain.weight.grad)
        assert same(dx, x.grad)
        if learn:
            assert not layer.qat_scale.grad.any()
        x.grad = layer.weight.grad = plain.weight.grad = None
        with pytest.raises(ValueError, match="has not begun to round: step"):
            quantize_(model, QATConfig(config, step="convert"))
        advance_qat(model)
    late = layer_of(config, start_step=2, learn_scales=learn)
    late.load_state_dict(layer.state_dict())
    early = layer_of(config, learn_scales=learn)
    with torch.no_grad():
        early.bias.copy_(layer.bias)
    for resumed in (layer, late):
        assert int(resumed.qat_step) == 2
        assert same(resumed(x), early(x))
    assert not same(early(x), plain(x))
    quantize_(model, QATConfig(config, step="convert"))
    assert "0.qat_step" not in model.state_dict()


def test_frozen_weights_are_rounded_and_pass_gradients_on():
    layer = nn.Linear(64, 32).requires_grad_(False)
    model = nn.Sequential(layer)
    config = ao_lab.Int4WeightOnlyConfig(group_size=32, kernel="dequantize")
    quantize_(model, QATConfig(config, learn_scales=True))
    x = numbers(3, 64).requires_grad_()
    y = model(x)
    y.sum().backward()
    assert layer.weight.grad is None
    assert layer.qat_scale.grad is None
    assert same(x.grad, torch.ones(3, 32) @ fast.fake_quantize(layer.weight, layer.qat.recipe.weight))
    quantize_(model, QATConfig(config, step="convert"))
    assert same(model(x), y)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("weight", ["int4_g32", "int4_g32_asymmetric", "fp8_rowwise", "ternary_rowwise"])
def test_groups_of_zeros(weight, learn):
    """They stay zeros, their gradients pass, and a learned scale there begins where the others are."""
    layer = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        layer.weight[:4] = 0
    model = nn.Sequential(layer)
    quantize_(model, QATConfig(SchemeConfig(scheme=weight), learn_scales=learn))
    x = numbers(3, 64)
    y = model(x)
    y.sum().backward()
    assert not y[:, :4].any()
    assert torch.equal(layer.weight.grad[:4], x.sum(0).expand(4, 64))
    if learn:
        assert torch.equal(layer.qat_scale[:4], layer.qat_scale.amax().expand_as(layer.qat_scale[:4]))
    layer.weight.data.zero_()
    assert not model(x).any()


# Gradients of layers in training where a kernel marks what saturates: what is rounded, in which order, and what is masked.


INPUTS, WEIGHTS = "int8_rowwise_asymmetric", "int4_g32_asymmetric"
ALL = (True, True, False, False, False, False)


class Masks:
    """`fast.quantize.fake_quantize` without a GPU: masks are those of rows, made by the public functions."""

    def __init__(self):
        self.rounded, self.masked, self.alive = [], [], []

    def fake_quantize_with_mask(self, x, scheme, axis=-1):
        assert all(made() is None for made in self.alive), "an operand outlived its product"
        self.rounded.append(tuple(x.shape))
        lost = fast.fake_quantize_vjp(torch.ones_like(x), x, scheme, axis=axis)[0] == 0
        y = fast.fake_quantize(x, scheme, axis=axis)
        self.alive.append(weakref.ref(y))
        return y, lost.any(-1).to(torch.uint8)

    def mask_gradient(self, g, x, mask, scheme, axis=-1):
        self.masked.append(tuple(x.shape))
        dx = fast.fake_quantize_vjp(g, x, scheme, axis=axis)[0]
        return g.copy_(torch.where(mask[:, None] != 0, dx, g))


@pytest.fixture
def masks(monkeypatch):
    made = Masks()
    monkeypatch.setattr(linear, "fake_quantize", made)
    monkeypatch.setattr(linear, "has_kernels", lambda x: True)
    return made


def made(rows, outputs, inputs=INPUTS, weights=WEIGHTS, started=None, wanted=ALL):
    """(gradients of x and W, the tensors that they are of)."""
    x, w = (operands((count, 64), torch.bfloat16, "cpu") for count in (rows, outputs))
    g = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(3)).bfloat16()
    rule = Rule.of(Recipe(weight=named(weights), activation=named(inputs)), -1)
    dx, dw, *_ = gradients(g, x, w, Given(started=started), rule, wanted)
    return (dx, dw), (g, x, w)


@pytest.mark.parametrize(("rows", "outputs"), [(96, 32), (32, 96)])
def test_masked_gradients_are_those_of_the_public_functions(masks, rows, outputs):
    """And the larger operand comes first."""
    found, tensors = made(rows, outputs)
    for mine, right in zip(found, expected_gradients(*tensors, INPUTS, WEIGHTS), strict=True):
        assert_same_bits(mine, right)
        assert (mine == 0).any()
    assert masks.rounded == [(96, 64), (32, 64)]
    assert sorted(masks.masked) == [(32, 64), (96, 64)]


def test_inputs_that_are_not_rounded_come_last(masks, monkeypatch):
    """The weight's copy is gone before the weight's gradient is there."""
    products, mm = [], torch.mm

    def spied(a, b):
        products.append(tuple(mm(a, b).shape))
        return mm(a, b)

    monkeypatch.setattr(torch, "mm", spied)
    made(96, 32, inputs=None)
    assert products == [(96, 64), (32, 64)]
    assert masks.rounded == [(32, 64)]


def test_what_cannot_saturate_has_no_mask(masks, monkeypatch):
    """Nor is its gradient looked at."""
    monkeypatch.setattr(fast, "fake_quantize_vjp", None)
    made(64, 32, "int8_rowwise", "int4_g32")
    assert masks.rounded == []
    assert masks.masked == []


@pytest.mark.parametrize("begun", [False, True])
def test_before_the_start_nothing_is_masked(masks, begun):
    found, (g, x, w) = made(64, 32, started=torch.tensor(begun))
    if begun:
        assert_same_bits(found[0], expected_gradients(g, x, w, INPUTS, WEIGHTS)[0])
    else:
        assert_same_bits(found[0], torch.mm(g, w))
        assert_same_bits(found[1], torch.mm(g.t(), x))


def test_a_frozen_weight_leaves_inputs_unrounded(masks):
    """Then their mask is that of `fake_quantize_vjp`."""
    found, tensors = made(64, 32, wanted=(True, False, False, False, False, False))
    assert found[1] is None
    assert masks.rounded == [(32, 64)]
    assert masks.masked == []
    assert_same_bits(found[0], expected_gradients(*tensors, INPUTS, WEIGHTS)[0])


def test_other_dtypes_of_weights_go_the_ordinary_way(masks, monkeypatch):
    """Under autocast weights are float32 beside bfloat16 inputs: values are stored and read, not rounded in one pass."""
    x, w = operands((64, 64), torch.bfloat16, "cpu"), operands((32, 64), torch.float32, "cpu")
    g = torch.ones(64, 32, dtype=torch.bfloat16)
    rule = Rule.of(Recipe(weight=named(WEIGHTS), activation=named(INPUTS)), -1)
    _, dw, *_ = gradients(g, x, w, Given(), rule, ALL)
    assert masks.rounded == [(64, 64)]
    right = torch.mm(g.t(), fast.fake_quantize(x, INPUTS)).float()
    assert_same_bits(dw, fast.fake_quantize_vjp(right, w, WEIGHTS)[0])
