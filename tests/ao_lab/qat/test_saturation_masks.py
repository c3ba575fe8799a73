"""Gradients of layers in training where a kernel marks what saturates: what is rounded, in which order, and what is masked."""

import weakref

import pytest
import torch

import fast
from ao_lab.config.recipe import Recipe, named
from ao_lab.qat import forward
from ao_lab.qat.forward import Given, Rule, gradients
from ao_lab.testing.strategies import assert_same_bits
from tests.gpu.models.qat import expected, numbers

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
    monkeypatch.setattr(forward, "saturation", made)
    monkeypatch.setattr(forward, "has_kernels", lambda x: True)
    return made


def made(rows, outputs, inputs=INPUTS, weights=WEIGHTS, started=None, wanted=ALL):
    """(gradients of x and W, the tensors that they are of)."""
    x, w = (numbers((count, 64), torch.bfloat16, "cpu") for count in (rows, outputs))
    g = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(3)).bfloat16()
    rule = Rule.of(Recipe(weight=named(weights), activation=named(inputs)), -1)
    dx, dw, *_ = gradients(g, x, w, Given(started=started), rule, wanted)
    return (dx, dw), (g, x, w)


@pytest.mark.parametrize(("rows", "outputs"), [(96, 32), (32, 96)])
def test_masked_gradients_are_those_of_the_public_functions(masks, rows, outputs):
    """And the larger operand comes first."""
    found, tensors = made(rows, outputs)
    for mine, right in zip(found, expected(*tensors, INPUTS, WEIGHTS), strict=True):
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
        assert_same_bits(found[0], expected(g, x, w, INPUTS, WEIGHTS)[0])
    else:
        assert_same_bits(found[0], torch.mm(g, w))
        assert_same_bits(found[1], torch.mm(g.t(), x))


def test_a_frozen_weight_leaves_inputs_unrounded(masks):
    """Then their mask is that of `fake_quantize_vjp`."""
    found, tensors = made(64, 32, wanted=(True, False, False, False, False, False))
    assert found[1] is None
    assert masks.rounded == [(32, 64)]
    assert masks.masked == []
    assert_same_bits(found[0], expected(*tensors, INPUTS, WEIGHTS)[0])


def test_other_dtypes_of_weights_go_the_ordinary_way(masks, monkeypatch):
    """Under autocast weights are float32 beside bfloat16 inputs: values are stored and read, not rounded in one pass."""
    x, w = numbers((64, 64), torch.bfloat16, "cpu"), numbers((32, 64), torch.float32, "cpu")
    g = torch.ones(64, 32, dtype=torch.bfloat16)
    rule = Rule.of(Recipe(weight=named(WEIGHTS), activation=named(INPUTS)), -1)
    _, dw, *_ = gradients(g, x, w, Given(), rule, ALL)
    assert masks.rounded == [(64, 64)]
    right = torch.mm(g.t(), fast.fake_quantize(x, INPUTS)).float()
    assert_same_bits(dw, fast.fake_quantize_vjp(right, w, WEIGHTS)[0])
