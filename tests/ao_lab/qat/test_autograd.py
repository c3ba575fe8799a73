"""Layers in QAT under the transforms of torch.func: values and gradients of eager calls, and what has none says so."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import ao_lab
from ao_lab import (
    Int8DynamicActivationInt8WeightConfig,
    IntxWeightOnlyConfig,
    LoRA,
    QATConfig,
    SchemeConfig,
    SparseTrainingConfig,
    quantize_,
    sparsify_,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
DYNAMIC, WEIGHTS = Int8DynamicActivationInt8WeightConfig(), IntxWeightOnlyConfig()
FLOAT32 = torch.float32
CONFIGS = {
    "plain": QATConfig(DYNAMIC),
    "learned": QATConfig(WEIGHTS, learn_scales=True),
    "late": QATConfig(DYNAMIC, start_step=1),
    "adapters": QATConfig(DYNAMIC, lora=LoRA(4, dtype=FLOAT32)),
    "sum": QATConfig(DYNAMIC, lora=LoRA(4, dtype=FLOAT32, rounds="sum")),
}
KINDS = (*CONFIGS, "sparse", "sparse and plain")


def prepared(kind, products="dense", gradient="masked"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
    if kind in CONFIGS or kind != "sparse":
        quantize_(net, CONFIGS[kind if kind in CONFIGS else "plain"])
    if kind.startswith("sparse"):
        sparsify_(net, SparseTrainingConfig(products=products, gradient=gradient))
    for name, parameter in net.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1)
    return net


#: More roundings than follow each other from the inputs to any value: sums over 16, 8 and 4 features, there and back, and over
#: the loss's 32 squares. Each of two orders of float32 sums is off by half an ulp of the sum of absolute terms for each.
ROUNDINGS = 128


def close(kind, a, b, rtol=1e-5, atol=1e-6, size=None):
    """Within torch's own bounds; of adapters, whose eager products of codes are exact, within those of `size`, sums of absolute
    terms."""
    if kind != "adapters":
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        return
    assert ((a - b).abs() <= 2 * ROUNDINGS * 2.0**-24 * size).all()


def absolute(net, parameters, x):
    """The outputs of layers with adapters where every term is positive: inputs are rounded by half a code at most."""
    h = x.abs()
    for name in "02":
        layer = net[int(name)]
        weight, bias = layer.weight.dequantize().abs(), layer.bias.abs()
        a, b = (parameters[f"{name}.lora_{which}"].abs() for which in "ab")
        rounded = h + h.amax(-1, keepdim=True) / 254
        h = rounded @ weight.T + bias + layer.lora.factor * (h @ a.T) @ b.T
    return h


def absolute_of(kind, net, x):
    """`absolute` of adapters; of the others, which need none, zeros."""
    return absolute(net, dict(net.named_parameters()), x) if kind == "adapters" else torch.zeros(1)


def absolute_gradients(kind, net, x):
    """Of the loss, with positive terms."""
    if kind != "adapters":
        return {}
    parameters = {name: p.abs() for name, p in trained(net).items()}
    return grad(lambda p: absolute(net, p, x).square().mean())(parameters)


def absolute_jacobian(kind, net, x):
    """Of the outputs by the inputs, with positive terms."""
    if kind != "adapters":
        return torch.zeros((*x.shape[:-1], 8, *x.shape))
    return jacrev(lambda one: absolute(net, dict(net.named_parameters()), one))(x.abs())


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def trained(net):
    return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_reverse_mode(kind):
    """grad gives autograd's gradients of all that trains, example by example under vmap; jacrev those of the inputs."""
    net, x = prepared(kind), inputs(4, 16)

    def loss(parameters, x):
        return functional_call(net, parameters, (x,)).square().mean()

    found = grad(loss)(trained(net), x)
    loss(dict(net.named_parameters()), x).backward()
    parameters = dict(net.named_parameters())
    sizes = absolute_gradients(kind, net, x)
    for name, value in found.items():
        close(kind, value, parameters[name].grad, size=sizes.get(name))
    each = vmap(grad(loss), (None, 0))(trained(net), x[:, None])
    for at in range(4):
        alone = grad(loss)(trained(net), x[at : at + 1])
        sizes = absolute_gradients(kind, net, x[at : at + 1])
        for name, value in alone.items():
            close(kind, each[name][at], value, size=sizes.get(name))
    close(kind, vjp(net, x)[0], net(x), 0, 0, absolute_of(kind, net, x))
    assert jacrev(net)(x[0]).shape == (8, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode(kind):
    """jvp of the inputs is the product with the Jacobian of reverse mode; second derivatives are there too."""
    net, x, t = prepared(kind), inputs(4, 16), inputs(4, 16).flip(0)
    y, tangent = jvp(net, (x,), (t,))
    close(kind, y, net(x), 0, 0, absolute_of(kind, net, x))
    jacobian, sizes = jacrev(net)(x), absolute_jacobian(kind, net, x)
    product = partial(torch.einsum, "abcd,cd->ab")
    close(kind, tangent, product(jacobian, t), 1e-4, size=product(sizes, t.abs()))
    close(kind, jacfwd(net)(x[0]), jacrev(net)(x[0]), 1e-4, size=absolute_jacobian(kind, net, x[0]))
    assert hessian(lambda one: net(one).square().mean())(x[0]).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_vmap(kind):
    """Each example as alone: an example's values choose its own scales alone."""
    net, x = prepared(kind), inputs(3, 2, 16)
    x[1] *= 100
    for whole, one in zip(vmap(net)(x), x, strict=True):
        close(kind, whole, net(one), size=absolute_of(kind, net, one))


def test_sr_ste_has_the_gradients_of_eager_calls():
    """Bit for bit; twice too, and example by example."""
    net, x = prepared("sparse", gradient="sr-ste"), inputs(4, 16)

    def loss(parameters, x):
        return functional_call(net, parameters, (x,)).square().mean()

    expected = torch.autograd.grad(loss(dict(net.named_parameters()), x), list(net.parameters()))
    found = grad(loss)(trained(net), x)
    assert all(map(torch.equal, found.values(), expected))
    each = vmap(grad(loss), (None, 0))(trained(net), x[:, None])
    for at in range(4):
        alone = grad(loss)(trained(net), x[at : at + 1])
        for name, value in alone.items():
            torch.testing.assert_close(each[name][at], value)
    twice = grad(lambda p: sum(one.sum() for one in grad(loss)(p, x).values()))(trained(net))
    assert all(value.isfinite().all() for value in twice.values())


def test_tables():
    table = nn.Sequential(nn.Embedding(8, 16))
    quantize_(table, QATConfig(WEIGHTS), lambda module, name: True)
    found = grad(lambda p: functional_call(table, p, (torch.arange(4),)).square().sum())(trained(table))
    table(torch.arange(4)).square().sum().backward()
    torch.testing.assert_close(found["0.weight"], table[0].weight.grad)
    assert torch.equal(vmap(table)(torch.arange(4)), table(torch.arange(4)))


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (
            lambda: prepared("learned"),
            lambda net, x: jvp(lambda p: functional_call(net, p, (x,)), (trained(net),), (trained(net),)),
            r"learned scales of shape \(8, 1\) have no forward-mode derivative",
        ),
        (
            lambda: prepared("adapters"),
            lambda net, x: grad(lambda p: functional_call(net, p, (x,)).sum())(dict(net.named_parameters())),
            r"frozen quantized weight of shape \(8, 16\) is among the parameters that torch.func.grad was given",
        ),
        (
            lambda: prepared("sparse", gradient="sr-ste"),
            lambda net, x: jvp(lambda p: functional_call(net, p, (x,)), (trained(net),), (trained(net),)),
            r"gradient='sr-ste' of a weight of shape \(8, 16\) has no forward-mode",
        ),
    ],
)
def test_refused(make, call, message):
    with pytest.raises((NotImplementedError, TypeError), match=message):
        call(make(), inputs(4, 16))


def test_named_kernels_are_refused():
    net = nn.Sequential(nn.Linear(16, 8))
    quantize_(net, QATConfig(SchemeConfig(scheme="int8_rowwise", kernel="reference")))
    with pytest.raises(
        NotImplementedError, match=r"torch.func.vmap of a layer of shape \(8, 16\) with kernel="
    ):
        vmap(net)(inputs(4, 16))


def test_sparse_squared_relu():
    """Its operator has a rule for vmap, and derivatives are those of eager calls, NaN included."""
    x = inputs(6, 16)
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    leaf, g = x.clone().requires_grad_(), inputs(6, 16).flip(0)
    (expected,) = torch.autograd.grad(ao_lab.sparse_squared_relu(leaf), leaf, g)
    torch.testing.assert_close(vjp(ao_lab.sparse_squared_relu, x)[1](g)[0], expected, equal_nan=True)
    torch.testing.assert_close(
        vmap(ao_lab.sparse_squared_relu)(x), ao_lab.sparse_squared_relu(x), equal_nan=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_torch_jit_trace(kind):
    """A traced program is right for other inputs, of another number of rows."""
    net, x = prepared(kind), inputs(4, 16)
    program, other = torch.jit.trace(net, (x,)), 3 * x[:3].flip(0)
    torch.testing.assert_close(program(other), net(other))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_no_axis_and_of_no_rows(kind):
    net = prepared(kind)
    with pytest.raises(RuntimeError, match="both arguments to linear need to be at least 1D"):
        net(torch.tensor(1.0))
    for shape in ((0, 16), (2, 0, 16), (16,)):
        y = net(torch.zeros(shape))
        assert y.shape == (*shape[:-1], 8)
        y.sum().backward()
