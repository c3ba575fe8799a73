"""Layers in training under torch.compile, export, autocast and FSDP's and checkpointing's hooks, and what they keep."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ao_lab
from ao_lab import QATConfig, SchemeConfig, quantize_
from ao_lab.qat.forward import rule_of
from tests.ao_lab.config.test_every_config import TOKENS
from tests.support.models.qat_models import everything, in_training, multiplied, same

CONFIGS = {
    "int8 x int4": ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "int4": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "int2 in bfloat16": SchemeConfig(scheme="int2_g32_bf16"),
    "mxfp4": ao_lab.MXDynamicActivationMXWeightConfig(weight_dtype="float4_e2m1fn_x2"),
    "nvfp4": ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(),
    "static": ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.02),
}
OPTIONS = [{}, {"start_step": 1}]


def gradients(net, run=None):
    net.zero_grad()
    y = net(TOKENS) if run is None else run(TOKENS)
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_whole(name, options):
    net = in_training(CONFIGS[name], torch.bfloat16, everything, **options)
    ao_lab.advance_qat(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradients(net, compiled), gradients(net), strict=True):
        assert same(ours, theirs)
    torch.compiler.reset()


def test_compiled_with_learned_scales():
    net = in_training(CONFIGS["int4"], learn_scales=True, scale_gradient="lsq")
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
    net = in_training(CONFIGS["int8 x int4"], torch.float32, everything)
    program = torch.export.export(net, (TOKENS,), strict=strict)
    assert same(program.module()(TOKENS), net(TOKENS))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "ao_lab.qat_linear.default" in targets


@pytest.mark.parametrize("name", CONFIGS)
def test_operators(name):
    from ao_lab.qat.autograd import qat_linear_op

    net = in_training(CONFIGS[name])
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
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_of_a_weights_size_is_kept(name, compiled):
    """A linear layer keeps its input and the parameter: what nn.Linear keeps."""
    model = nn.Sequential(nn.Linear(256, 512))
    quantize_(model, QATConfig(CONFIGS[name]))
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


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast(name):
    """Weights in float32, products in bfloat16: both sides multiply the same bits."""
    config = replace(CONFIGS[name], kernel="reference")
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
    config = CONFIGS["int4"]
    net = in_training(config)
    with multiplied() as operands, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        net.first(torch.randn(4, 128))
    quantize_(net, QATConfig(config, step="convert"))
    assert same(operands[0][1], net.first.weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_weight_keeps_no_input(compiled):
    """What adapters beside a frozen layer need: nothing but the parameter."""
    model = nn.Sequential(nn.Linear(256, 512)).requires_grad_(False)
    quantize_(model, QATConfig(CONFIGS["int4"]))
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
    net = in_training(CONFIGS["int8 x int4"], start_step=1)
    ao_lab.advance_qat(net)
    straight = gradients(net)
    again = gradients(net, lambda tokens: checkpoint(net, tokens, use_reentrant=False))
    assert all(same(a, b) for a, b in zip(straight, again, strict=True))


def test_inputs_of_any_rank():
    net = in_training(CONFIGS["int8 x int4"])
    for shape in ((128,), (0, 128), (3, 128), (2, 3, 128)):
        x = torch.randn(shape, requires_grad=True)
        y = net.first(x)
        assert y.shape == (*shape[:-1], 256)
        y.sum().backward()
        assert x.grad.shape == shape


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rule_is_one_line(name):
    """Compilers write operators' arguments into comments of the programs that they make: a second line would be code."""
    layer = next(m for m in in_training(CONFIGS[name]).modules() if hasattr(m, "qat"))
    assert len(layer.qat.rule.text.splitlines()) == 1
    assert rule_of(layer.qat.rule.text) == layer.qat.rule


@pytest.mark.parametrize(("kernel", "compiled"), [("auto", False), ("auto", True), ("reference", False)])
def test_a_bias_of_another_dtype_is_as_the_converted_layer_takes_it(kernel, compiled):
    """Where that raises, as nn.Linear does, training raises; where it adds the bias unrounded, so does training."""
    config = replace(CONFIGS["int8 x int4"], kernel=kernel)
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


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [*CONFIGS, "fp8"])
def test_torch_jit_trace(name):
    """A saved program takes batches of other sizes, and has the gradients of the layers."""
    config = ao_lab.Float8DynamicActivationFloat8WeightConfig() if name == "fp8" else CONFIGS[name]
    net, file = in_training(config, torch.float32, everything), io.BytesIO()
    torch.jit.save(torch.jit.trace(net, (TOKENS,)), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(TOKENS[:1, :3]), net(TOKENS[:1, :3]))
    pairs = zip(gradients(net), gradients(net, torch.jit.trace(net, (TOKENS,))), strict=True)
    assert all(same(ours, theirs) for ours, theirs in pairs)
