"""Adapters beside frozen, quantized weights: gradients, what is kept, frozen and saved, and the merge."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ao_lab
import fast
from ao_lab import (
    LoRA,
    QATConfig,
    QuantizedTensor,
    lora_state_dict,
    quantize_,
)
from tests.ao_lab.config.test_every_config import TOKENS, Net
from tests.ao_lab.qat.test_tracing import gradients
from tests.support.models.qat_models import linears, same

CONFIGS = {
    "int8 x int4": ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "int8 x int8": ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "int4": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "stretched": ao_lab.LowBitWeightOnlyConfig(bits=2),
    "nf4": ao_lab.NF4WeightOnlyConfig(),
    "mxfp4": ao_lab.MXDynamicActivationMXWeightConfig(weight_dtype="float4_e2m1fn_x2"),
    "nvfp4": ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(),
    "static": ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.02),
}
DTYPES = (torch.float32, torch.bfloat16)
SUM = LoRA(rank=4, alpha=8, rounds="sum")


def adapted(config, dtype=torch.bfloat16, lora=None, filter_fn=linears):
    """A model with adapters, neither of which is zero."""
    net = Net(dtype)
    quantize_(net, QATConfig(config, lora=lora or LoRA(rank=4, alpha=8)), filter_fn)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in (net.first, net.second):
            for part in (layer.lora_a, layer.lora_b):
                part.copy_(0.1 * torch.randn(part.shape, generator=generator))
    return net


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_a_plain_implementation(name, dtype):
    layer = adapted(CONFIGS[name], dtype).first
    layer.bias.requires_grad_()
    recipe, scales = layer.weight.recipe, layer.weight.input_scales
    x, g = numbers(6, 128, dtype=dtype).requires_grad_(), numbers(6, 256, seed=2, dtype=dtype)
    y = layer(x)
    y.backward(g)
    rows = x.detach().clone().requires_grad_()
    a, b = (part.detach().clone().requires_grad_() for part in (layer.lora_a, layer.lora_b))
    nn.functional.linear(rows, a.to(dtype)).matmul(b.to(dtype).t() * 2).backward(g)
    base = g @ layer.weight.detach().dequantize()
    if recipe.activation is not None:
        base = fast.fake_quantize_vjp(base, x.detach(), recipe.activation, scales=scales)[0]
    assert same(x.grad, rows.grad + base)
    assert same(layer.lora_a.grad, a.grad)
    assert same(layer.lora_b.grad, b.grad)
    assert same(layer.bias.grad, g.sum(0))
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_training_begins_at_the_quantized_model(name, dtype):
    """B is zero: the forward is that of `quantize_`, the same codes, in every shape of inputs."""
    net, plain = Net(dtype), Net(dtype)
    quantize_(net, QATConfig(CONFIGS[name], lora=LoRA(rank=4)))
    quantize_(plain, CONFIGS[name], linears)
    assert same(net.first.weight.codes, plain.first.weight.codes)
    assert same(net(TOKENS), plain(TOKENS))
    x = numbers(128, dtype=dtype)
    assert same(net.first(x), plain.first(x))
    assert net.first(numbers(0, 128, dtype=dtype)).shape == (0, 256)


@pytest.mark.parametrize("name", ["int8 x int4", "int4", "nvfp4"])
def test_only_adapters_train(name):
    net = adapted(CONFIGS[name])
    net.table.requires_grad_(False)
    codes = net.first.weight.codes.clone()
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}.{part}" for layer in ("first", "second") for part in ("lora_a", "lora_b")}
    before = lora_state_dict(net)["first.lora_b"].clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (net(TOKENS).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert same(net.first.weight.codes, codes)
    assert not same(net.first.lora_b.detach(), before)
    assert {len(state) for state in optimizer.state.values()} == {3}
    assert len(optimizer.state) == 4


def kept(layer, run):
    """Bytes that autograd keeps beside a layer's parameters (of a quantized one, its parts), by their address."""
    found, own = {}, set()

    def parts(tensor):
        inside = tensor.parts.values() if isinstance(tensor, QuantizedTensor) else [tensor]
        return [part for part in inside if part is not None]

    def pack(tensor):
        found.update(
            (one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in parts(tensor)
        )
        return tensor

    for parameter in layer.parameters():
        own.update(part.untyped_storage().data_ptr() for part in parts(parameter))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run()
    return y, {address: size for address, size in found.items() if address not in own}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_kept_but_the_input(name, compiled, dropout):
    """No dense weight, no rounded input, no mask: x, the adapters' low-rank activations, and what the model has anyway."""
    model = nn.Sequential(nn.Linear(256, 512)).to(torch.bfloat16)
    quantize_(model, QATConfig(CONFIGS[name], lora=LoRA(rank=4, dropout=dropout)))
    x = numbers(64, 256).requires_grad_()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    run(x)
    y, others = kept(model[0], lambda: run(x))
    others.pop(x.untyped_storage().data_ptr(), None)
    # 64 rows of 4 numbers, and the state of the generator that drops; a mask would be 64 rows of 256 bytes.
    state = torch.get_rng_state().nbytes if dropout else 0
    assert sum(others.values()) <= 64 * 4 * 2 + state, others
    y.sum().backward()
    torch.compiler.reset()


def test_dropout_is_drawn_again_in_backward():
    net = adapted(CONFIGS["int4"], torch.float32, LoRA(rank=4, alpha=8, dropout=0.5, dtype=torch.float32))
    layer, x, g = (
        net.first,
        numbers(6, 128, dtype=torch.float32),
        numbers(6, 256, seed=2, dtype=torch.float32),
    )
    torch.manual_seed(7)
    layer(x).backward(g)
    torch.manual_seed(7)
    dropped = nn.functional.dropout(x, 0.5)
    assert same(layer.lora_b.grad, 2 * g.t() @ (dropped @ layer.lora_a.detach().t()))
    torch.testing.assert_close(layer.lora_a.grad, 2 * (g @ layer.lora_b.detach()).t() @ dropped)
    net.eval()
    y = layer(x)
    assert same(y, layer(x))
    with torch.no_grad():
        net.train()
        assert not same(layer(x), y)


@pytest.mark.parametrize("lora", [LoRA(rank=4, alpha=8), SUM], ids=["base", "sum"])
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_whole(name, lora):
    net = adapted(CONFIGS[name], lora=replace(lora, freeze_rest=False))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    grads = [one for one in gradients(net, compiled) if one is not None]
    assert len(grads) == 1 + 1 + 4
    for ours, theirs in zip(grads, [one for one in gradients(net) if one is not None], strict=True):
        assert same(ours, theirs)
    torch.compiler.reset()


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    net = adapted(CONFIGS["int8 x int4"], torch.float32)
    program = torch.export.export(net, (TOKENS,), strict=strict)
    assert same(program.module()(TOKENS), net(TOKENS))


@pytest.mark.parametrize("name", CONFIGS)
def test_operators(name):
    from ao_lab.qat.lora import _text, frozen_parts_op

    weight = adapted(CONFIGS[name], torch.float32).first.weight
    x = torch.randn(4, 128)
    arguments = (x, *weight.parts.values(), None, list(weight.shape), _text(weight.meta))
    torch.library.opcheck(frozen_parts_op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["int8 x int4", "int4", "mxfp4"])
def test_autocast(name):
    """The layer's inputs are cast, as F.linear casts them; adapters keep their dtype."""
    net = adapted(CONFIGS[name], torch.float32)
    x = torch.randn(4, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = net.first(x)
        y.float().sum().backward()
    assert y.dtype == net.first.lora_a.grad.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert same(y.detach(), net.first(x.detach().bfloat16()))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", CONFIGS)
def test_under_activation_checkpointing_and_without_gradients(name, dropout):
    net = adapted(CONFIGS[name], lora=LoRA(rank=4, alpha=8, dropout=dropout))
    x = numbers(3, 5, 128).requires_grad_()
    found = []
    for run in (net.first, lambda x: checkpoint(net.first, x, use_reentrant=False)):
        net.zero_grad()
        x.grad = None
        torch.manual_seed(0)
        run(x).float().square().mean().backward()
        found.append([x.grad, net.first.lora_a.grad.clone(), net.first.lora_b.grad.clone()])
    assert all(same(ours, theirs) for ours, theirs in zip(*found, strict=True))
    net.eval()
    y = net(TOKENS)
    with torch.inference_mode():
        assert same(net(TOKENS), y.detach())
