"""Layers in QAT under the transforms of torch.func: values and gradients of eager calls, and what has none says so."""

import copy
import io
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

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
from ao_lab.qat.linear import rule_of
from tests.ao_lab.config.test_every_config import TOKENS
from tests.support.models.qat_models import everything, in_training, multiplied, same

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


# Layers in training under torch.compile, export, autocast and FSDP's and checkpointing's hooks, and what they keep.


TRACED = {
    "int8 x int4": ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "int4": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "int2 in bfloat16": SchemeConfig(scheme="int2_g32_bf16"),
    "mxfp4": ao_lab.MXDynamicActivationMXWeightConfig(weight_dtype="float4_e2m1fn_x2"),
    "nvfp4": ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(),
    "static": ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.02),
}
TRACED_OPTIONS = [{}, {"start_step": 1}]


def gradients(net, run=None):
    net.zero_grad()
    y = net(TOKENS) if run is None else run(TOKENS)
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("options", TRACED_OPTIONS, ids=str)
@pytest.mark.parametrize("name", TRACED)
def test_compiled_whole(name, options):
    net = in_training(TRACED[name], torch.bfloat16, everything, **options)
    ao_lab.advance_qat(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradients(net, compiled), gradients(net), strict=True):
        assert same(ours, theirs)
    torch.compiler.reset()


def test_compiled_with_learned_scales():
    net = in_training(TRACED["int4"], learn_scales=True, scale_gradient="lsq")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradients(net, compiled), gradients(net), strict=True):
        assert same(ours, theirs)
    torch.compiler.reset()


def test_batches_of_any_size_are_one_program():
    """A factor that counted the rows of a batch made a program for each size."""
    torch.compiler.reset()
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.02)
    layer = in_training(config, learn_scales=True).first
    run = torch.compile(layer, backend="aot_eager", dynamic=True)
    before = counters["stats"]["unique_graphs"]
    for rows in (3, 5, 8, 7):
        run(torch.randn(rows, 128)).sum().backward()
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    net = in_training(TRACED["int8 x int4"], torch.float32, everything)
    program = torch.export.export(net, (TOKENS,), strict=strict)
    assert same(program.module()(TOKENS), net(TOKENS))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "ao_lab.qat_linear.default" in targets


@pytest.mark.parametrize("name", TRACED)
def test_operators(name):
    from ao_lab.qat.linear import qat_linear_op

    net = in_training(TRACED[name])
    layer = net.first
    x = torch.randn(4, 128, requires_grad=True)
    arguments = (x, layer.weight, layer.bias, *layer.given().tensors, layer.qat.rule.text)
    torch.library.opcheck(qat_linear_op, arguments, test_utils=("test_schema", "test_faketensor"))


def kept(net, run):
    """Storage of every tensor that autograd keeps, by its address."""
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run()
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    return y, {address: size for address, size in found.items() if address not in own}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", TRACED)
def test_nothing_of_a_weights_size_is_kept(name, compiled):
    """A linear layer keeps its input and the parameter: what nn.Linear keeps."""
    model = nn.Sequential(nn.Linear(256, 512))
    quantize_(model, QATConfig(TRACED[name]))
    x = torch.randn(4, 256, requires_grad=True)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    run(x)
    y, others = kept(model, lambda: run(x))
    allowed = {x.untyped_storage().data_ptr(): x.nbytes}
    extra = {address: size for address, size in others.items() if address not in allowed}
    assert sum(extra.values()) <= 64, extra
    y.sum().backward()
    torch.compiler.reset()


def test_embeddings_keep_no_table():
    model = nn.Sequential(nn.Embedding(512, 64))
    for scheme in ("int4_g32", "nf4", "nvfp4"):
        one = copy.deepcopy(model)
        quantize_(one, QATConfig(SchemeConfig(scheme=scheme)), everything)
        tokens = torch.tensor([1, 2, 3])
        y, others = kept(one, lambda: one(tokens))  # noqa: B023  (run at once)
        assert sum(others.values()) < 1024
        y.sum().backward()


@pytest.mark.parametrize("name", TRACED)
def test_autocast(name):
    """Weights in float32, products in bfloat16: both sides multiply the same bits."""
    config = replace(TRACED[name], kernel="reference")
    net = in_training(config)
    x = torch.randn(4, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = net.first(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert net.first.weight.grad.dtype == x.grad.dtype == torch.float32
    quantize_(net, QATConfig(config, step="convert"))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert same(net.first(x), y)


def test_autocast_multiplies_what_is_stored():
    config = TRACED["int4"]
    net = in_training(config)
    with multiplied() as operands, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        net.first(torch.randn(4, 128))
    quantize_(net, QATConfig(config, step="convert"))
    assert same(operands[0][1], net.first.weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_weight_keeps_no_input(compiled):
    """What adapters beside a frozen layer need: nothing but the parameter."""
    model = nn.Sequential(nn.Linear(256, 512)).requires_grad_(False)
    quantize_(model, QATConfig(TRACED["int4"]))
    x = torch.randn(4, 256, requires_grad=True)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    run(x)
    y, others = kept(model, lambda: run(x))
    assert others == {}
    y.sum().backward()
    dense = ao_lab.fake_quantize(model[0].weight, model[0].qat.recipe.weight)
    assert same(x.grad, torch.ones(4, 512) @ dense)
    torch.compiler.reset()


def test_checkpointing():
    net = in_training(TRACED["int8 x int4"], start_step=1)
    ao_lab.advance_qat(net)
    straight = gradients(net)
    again = gradients(net, lambda tokens: checkpoint(net, tokens, use_reentrant=False))
    assert all(same(a, b) for a, b in zip(straight, again, strict=True))


def test_inputs_of_any_rank():
    net = in_training(TRACED["int8 x int4"])
    for shape in ((128,), (0, 128), (3, 128), (2, 3, 128)):
        x = torch.randn(shape, requires_grad=True)
        y = net.first(x)
        assert y.shape == (*shape[:-1], 256)
        y.sum().backward()
        assert x.grad.shape == shape


@pytest.mark.parametrize("name", TRACED)
def test_a_rule_is_one_line(name):
    """Compilers write operators' arguments into comments of the programs that they make: a second line would be code."""
    layer = next(m for m in in_training(TRACED[name]).modules() if hasattr(m, "qat"))
    assert len(layer.qat.rule.text.splitlines()) == 1
    assert rule_of(layer.qat.rule.text) == layer.qat.rule


@pytest.mark.parametrize(("kernel", "compiled"), [("auto", False), ("auto", True), ("reference", False)])
def test_a_bias_of_another_dtype_is_as_the_converted_layer_takes_it(kernel, compiled):
    """Where that raises, as nn.Linear does, training raises; where it adds the bias unrounded, so does training."""
    config = replace(TRACED["int8 x int4"], kernel=kernel)
    layer = in_training(config).first
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    if kernel == "auto":
        with pytest.raises(RuntimeError, match="dtype"):
            run(x)
        return
    y = layer(x)
    y.sum().backward()
    assert layer.bias.grad.dtype == torch.float32
    quantize_(layer, QATConfig(config, step="convert"))
    assert same(layer(x), y.detach())


@pytest.mark.parametrize("name", [*TRACED, "fp8"])
def test_a_saved_trace(name):
    """A saved program takes batches of other sizes, and has the gradients of the layers."""
    config = ao_lab.Float8DynamicActivationFloat8WeightConfig() if name == "fp8" else TRACED[name]
    net, file = in_training(config, torch.float32, everything), io.BytesIO()
    torch.jit.save(torch.jit.trace(net, (TOKENS,)), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(TOKENS[:1, :3]), net(TOKENS[:1, :3]))
    pairs = zip(gradients(net), gradients(net, torch.jit.trace(net, (TOKENS,))), strict=True)
    assert all(same(ours, theirs) for ours, theirs in pairs)
