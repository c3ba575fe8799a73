"""Products with experts in a forward of a module's own: taken over, or an error, never in high precision unseen."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

import ao_lab
from ao_lab.training.grouped.autograd import grouped_linear
from reference.training import RECIPES

T, K, F, E = 24, 32, 64, 4
SIZES = (9, 0, 1, 14)


class Experts(nn.Module):
    """A first product that every recipe takes over, and a second one of a test's own."""

    def __init__(self, second):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, F, K) / 8)
        self.w2 = nn.Parameter(torch.randn(E, K, F) / 8)
        self.b2 = nn.Parameter(torch.randn(E, 1, K))
        self.second = second

    def forward(self, *, x):
        parts = [(e, silu(linear(part, self.w1[e]))) for e, part in enumerate(torch.split(x, SIZES))]
        return torch.cat([self.second(self, h, e) for e, h in parts])


def converted(second, seed=0):
    torch.manual_seed(seed)
    plain = Experts(second).bfloat16()
    net = copy.deepcopy(plain)
    ao_lab.convert_for_training_(net, "rowwise")
    return net, plain, torch.randn(T, K).bfloat16()


TAKEN = {
    "bias": lambda m, h, e: linear(h, m.w2[e], m.b2[e, 0]) - m.b2[e, 0],
    "keywords": lambda m, h, e: linear(h, weight=m.w2[e]),
    "all keywords": lambda m, h, e: linear(input=h, weight=m.w2[e], bias=None),
    "three axes": lambda m, h, e: linear(h[None], m.w2[e])[0],
    "matmul of three axes": lambda m, h, e: torch.matmul(h[:, None], m.w2[e].T)[:, 0],
    "matmul by keyword": lambda m, h, e: torch.matmul(h, other=m.w2[e].mT),
    "cast before": lambda m, h, e: linear(h, m.w2.float().bfloat16()[e]),
    "contiguous": lambda m, h, e: h @ m.w2[e].T.contiguous(),
    "rows one by one": lambda m, h, e: torch.stack([one @ m.w2[e].T for one in h]) if len(h) else h[:, :K],
}


@pytest.mark.parametrize("second", TAKEN)
def test_taken_over(second):
    """By the recipe, as `grouped_linear` of the same rows."""
    net, plain, x = converted(TAKEN[second])
    offsets = torch.tensor(SIZES).cumsum(0)
    h = silu(grouped_linear(x, plain.w1, offsets, RECIPES["rowwise"]))
    wanted = grouped_linear(h, plain.w2, offsets, RECIPES["rowwise"])
    found = net(x=x)
    if second == "bias":
        bias = plain.b2[:, 0].repeat_interleave(torch.tensor(SIZES), 0)
        wanted = wanted + bias - bias
    assert torch.equal(found, wanted)
    for y in (found, wanted):
        y.float().square().sum().backward()
    if second != "rows one by one":
        assert torch.equal(net.w2.grad, plain.w2.grad)


REFUSED = {
    "einsum": lambda m, h, e: torch.einsum("tf,kf->tk", h, m.w2[e]),
    "addmm": lambda m, h, e: torch.addmm(m.b2[e], h, m.w2[e].T),
    "baddbmm": lambda m, h, e: torch.baddbmm(m.b2[e][None], h[None], m.w2[e].T[None])[0],
    "matmul": lambda m, h, e: (m.w2[e] @ h.T).T,
    "mv": lambda m, h, e: torch.stack([torch.mv(m.w2[e], one) for one in h]) if len(h) else h[:, :K],
    "einsum of a cast": lambda m, h, e: torch.einsum("tf,kf->tk", h, m.w2[e].float().bfloat16()),
    "grouped_mm": lambda m, h, e: nn.functional.grouped_mm(
        h, m.w2.transpose(1, 2), offs=torch.full((E,), len(h), dtype=torch.int32), out_dtype=torch.float32
    ),
}


@pytest.mark.parametrize("second", REFUSED)
def test_refused(second):
    """By name of the parameter and of the function, before it is computed in high precision."""
    net, _, x = converted(REFUSED[second])
    with pytest.raises(
        RuntimeError, match=f"Experts multiplies .*w2 by _*{second.partition(' ')[0]} in a way"
    ):
        net(x=x)


def test_parameters_without_a_product():
    """One that is summed over, and one that no function takes."""
    for second in (lambda m, h, e: h @ h.new_zeros(F, K), lambda m, h, e: (h[:, None] * m.w2[e]).sum(2)):
        net, _, x = converted(second)
        with pytest.raises(RuntimeError, match=r"called no product with its experts .*, of w2; leave it out"):
            net(x=x)
