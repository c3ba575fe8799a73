"""vmap over layers whose inputs share a scale: what an example gives does not depend on the others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ao_lab import Recipe, SchemeConfig, quantize_, quantized
from ao_lab.tensor.transforms import shares_scales
from reference import SCHEMES, Scales

# torch's forward-mode derivatives script functions of its own.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

#: One scale for the tensor, one outer scale, and one that is given: with the first two rows depend on each other.
SHARED = [("fp8_tensorwise", "fp8_tensorwise"), ("nvfp4", "nvfp4"), ("int8_rowwise", "int8_tensorwise")]
OWN = [("int8_rowwise", "int8_rowwise"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("nf4", None)]


def layer(scheme, activation, bias=True):
    made = nn.Linear(64, 32, bias=bias)
    for at, parameter in enumerate(made.parameters()):
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(at))
    quantize_(made, SchemeConfig(scheme=scheme, activation_scheme=activation))
    return made.requires_grad_(False)


def examples(*shape):
    xs = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(3))
    xs[0] *= 100
    return xs


@pytest.mark.parametrize(("scheme", "activation"), SHARED)
@pytest.mark.parametrize("bias", [True, False])
def test_an_example_gives_what_it_gives_alone(scheme, activation, bias):
    m = layer(scheme, activation, bias)
    assert shares_scales(m.weight)
    for xs in (examples(4, 3), examples(4), examples(2, 2, 3)):
        wanted = torch.stack([m(x) for x in xs])
        assert torch.equal(torch.vmap(m)(xs), wanted)
        assert torch.equal(torch.vmap(m, in_dims=1)(xs.transpose(0, 1)), wanted) or xs.dim() == 2
    nested = torch.vmap(torch.vmap(m))(examples(2, 2, 3))
    assert torch.equal(nested, torch.stack([torch.stack([m(x) for x in xs]) for xs in examples(2, 2, 3)]))


@pytest.mark.parametrize(("scheme", "activation"), [*SHARED, OWN[0]])
def test_gradients_of_each_example(scheme, activation):
    m, xs = layer(scheme, activation), examples(4, 3)

    def loss(x, bias):
        return F.linear(x, m.weight, bias).square().sum()

    wanted = [torch.func.grad(loss, argnums=(0, 1))(x, m.bias) for x in xs]
    made = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(xs, m.bias)
    for at in (0, 1):
        torch.testing.assert_close(made[at], torch.stack([one[at] for one in wanted]))
    tangents = torch.ones_like(xs)
    pushed = torch.vmap(lambda x, t: torch.func.jvp(m, (x,), (t,)))(xs, tangents)
    alone = [torch.func.jvp(m, (x,), (t,)) for x, t in zip(xs, tangents, strict=True)]
    for at in (0, 1):
        torch.testing.assert_close(pushed[at], torch.stack([one[at] for one in alone]))


@pytest.mark.parametrize("of", [torch.func.jacrev, torch.func.jacfwd])
def test_jacobians_of_each_example(of):
    m, xs = layer("nvfp4", "nvfp4"), examples(3)
    torch.testing.assert_close(torch.vmap(of(m))(xs), torch.stack([of(m)(x) for x in xs]))


@pytest.mark.parametrize(("scheme", "activation"), OWN)
def test_rows_with_scales_of_their_own_go_together(scheme, activation):
    m, xs = layer(scheme, activation), examples(4, 3)
    assert not shares_scales(m.weight)
    torch.testing.assert_close(torch.vmap(m)(xs), torch.stack([m(x) for x in xs]), rtol=1e-4, atol=1e-4)


def test_given_scales_are_shared_by_right():
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_tensorwise"])
    weight = quantized(torch.ones(32, 64), recipe, input_scales=Scales(torch.tensor(0.03)))
    assert not shares_scales(weight)


def test_other_products_and_stacked_weights_are_refused():
    recipe = Recipe(weight=SCHEMES["fp8_tensorwise"], activation=SCHEMES["fp8_tensorwise"])
    weights, xs = quantized(torch.ones(4, 32, 64), recipe), examples(4, 3)
    for call in (
        lambda: torch.vmap(lambda x: x @ weights[0].t())(xs),
        lambda: torch.vmap(F.linear)(xs, weights),
    ):
        with pytest.raises(ValueError, match=r"one scale for all rows.* one example after the other"):
            call()
    own = quantized(
        torch.ones(4, 32, 64), Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"])
    )
    torch.testing.assert_close(
        torch.vmap(F.linear)(xs, own), torch.stack([F.linear(x, w) for x, w in zip(xs, own, strict=True)])
    )
