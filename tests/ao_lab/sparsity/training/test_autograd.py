"""The masked linear layer: bit for bit torch's own of the masked weight, and the weight's gradient by each rule."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import reference
from ao_lab.sparsity.training.autograd import Rule, masked_linear, sr_ste_gradient, weight_gradient
from tests.support.models.qat_models import same as same_bits

MASKED = Rule("masked", 2e-4, "dense", False)
STRAIGHT = Rule("straight-through", 2e-4, "dense", False)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(dtype, shape, bias=True):
    random = torch.Generator().manual_seed(3)
    x = torch.randn((*shape, 32), generator=random).to(dtype).requires_grad_()
    w = torch.randn((24, 32), generator=random).to(dtype).requires_grad_()
    b = torch.randn(24, generator=random).to(dtype).requires_grad_() if bias else None
    return x, w, torch.as_tensor(reference.prune(w.detach())), b


def gradients(y, *inputs):
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype)
    return torch.autograd.grad(y, [t for t in inputs if t is not None], g)


@pytest.mark.parametrize("rule", [MASKED, STRAIGHT], ids=lambda rule: rule.gradient)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_dense_autograd_of_the_masked_weight(dtype, rule):
    for shape, bias in itertools.product([(8,), (3, 5), (2, 3, 4), (0,)], [True, False]):
        x, w, mask, b = operands(dtype, shape, bias)
        kept = _straight(w, mask) if rule is STRAIGHT else torch.where(mask, w, torch.zeros((), dtype=dtype))
        theirs, ours = F.linear(x, kept, b), masked_linear(x, w, mask, b, rule)
        assert same_bits(ours.detach(), theirs.detach())
        for a, e in zip(gradients(ours, x, w, b), gradients(theirs, x, w, b), strict=True):
            assert same_bits(a, e)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, mask):
        return torch.where(mask, w, torch.zeros((), dtype=w.dtype))

    @staticmethod
    def backward(ctx, g):
        return g, None


def _straight(w, mask):
    return _Straight.apply(w, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", [0.0, 2e-4, 0.1, 3.0, 2.0**126])
def test_sr_ste_is_the_references(dtype, decay):
    """Normal numbers, both zeros, subnormals, infinities and NaN on both sides, kept and dropped."""
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan")])
    random = torch.Generator().manual_seed(5)
    g = torch.cat([torch.randn(400, generator=random), special.repeat_interleave(9)]).to(dtype)
    w = torch.cat([torch.randn(400, generator=random), special.repeat(9)]).to(dtype)
    mask = torch.rand(g.shape, generator=random) < 0.5
    expected = torch.as_tensor(reference.sr_ste_gradient(g, w, mask, decay=decay))
    made = weight_gradient(g, w, mask, Rule("sr-ste", decay, "dense", False))
    nan = expected.isnan() & ~mask  # the sign of a NaN that is made is the machine's
    assert torch.equal(made.isnan(), expected.isnan())
    assert same_bits(made[~nan], expected[~nan])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sr_ste_in_a_layer(dtype):
    x, w, mask, b = operands(dtype, (6,))
    (straight,) = gradients(masked_linear(x, w, mask, b, STRAIGHT), w)
    (made,) = gradients(masked_linear(x, w, mask, b, Rule("sr-ste", 0.3, "dense", False)), w)
    expected = torch.as_tensor(reference.sr_ste_gradient(straight, w.detach(), mask, decay=0.3))
    assert same_bits(made, expected)
    assert not torch.equal(made, straight)


def test_what_was_dropped_may_be_anything():
    x, w, mask, b = operands(torch.float32, (4,))
    wild = torch.where(mask, w.detach(), float("nan")).requires_grad_()
    ours, clean = masked_linear(x, wild, mask, b, MASKED), masked_linear(x, w, mask, b, MASKED)
    assert same_bits(ours.detach(), clean.detach())
    (dx,) = gradients(ours, x)
    assert same_bits(dx, gradients(clean, x)[0])


def test_dropped_weights_get_no_gradient_where_it_is_infinite():
    g = torch.full((2, 4), float("inf"))
    mask = torch.tensor([[True, False, True, False]] * 2)
    made = weight_gradient(g, None, mask, MASKED)
    assert made.tolist() == [[float("inf"), 0.0, float("inf"), 0.0]] * 2


@pytest.mark.parametrize(
    ("rule", "wants", "kept"),
    [
        (MASKED, (True, True), {"x", "w", "mask"}),
        (MASKED, (False, True), {"x", "mask"}),
        (STRAIGHT, (False, True), {"x"}),
        (Rule("sr-ste", 0.1, "dense", False), (False, True), {"x", "w", "mask"}),
        (MASKED, (True, False), {"w", "mask"}),
    ],
)
def test_no_masked_copy_is_kept(rule, wants, kept):
    x, w, mask, b = operands(torch.float32, (4,))
    x.requires_grad_(wants[0]), w.requires_grad_(wants[1])
    names = {t.untyped_storage().data_ptr(): name for name, t in (("x", x), ("w", w), ("mask", mask))}
    found = []

    def pack(t):
        found.append(names[t.untyped_storage().data_ptr()])
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        masked_linear(x, w, mask, b, rule)
    assert set(found) == kept


def test_autocast():
    """Products in bfloat16; the rule works on the float32 weight and its float32 gradient."""
    x, w, mask, b = operands(torch.float32, (6,))
    rule = Rule("sr-ste", 0.3, "dense", False)
    with torch.autocast("cpu", torch.bfloat16):
        y = masked_linear(x, w, mask, b, rule)
        expected = F.linear(x, _straight(w, mask), b)
    assert y.dtype == torch.bfloat16
    assert same_bits(y.detach(), expected.detach())
    (dx, dw, db), (ex, ew, eb) = gradients(y, x, w, b), gradients(expected, x, w, b)
    assert same_bits(dx, ex)
    assert same_bits(db, eb)
    assert dw.dtype == torch.float32
    assert same_bits(dw, torch.as_tensor(reference.sr_ste_gradient(ew, w.detach(), mask, decay=0.3)))


def test_operands_that_do_not_fit():
    x, w, mask, b = operands(torch.float32, (4,))
    with pytest.raises(TypeError, match=r"inputs are torch.bfloat16 and the weight is torch.float32"):
        masked_linear(x.bfloat16(), w, mask, b, MASKED)
    with pytest.raises(ValueError, match=r"has 32 elements, got shape \(4, 16\)"):
        masked_linear(x[:, :16], w, mask, b, MASKED)


def test_a_mask_that_is_renewed_before_backward_is_an_error():
    x, w, mask, b = operands(torch.float32, (4,))
    y = masked_linear(x, w, mask, b, MASKED)
    mask.copy_(~mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_operator():
    g, w = torch.randn(4, 8), torch.randn(4, 8)
    torch.library.opcheck(sr_ste_gradient, (g, w, g > 0, 0.1))
