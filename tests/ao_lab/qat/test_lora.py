"""Adapters beside frozen, quantized weights: gradients, what is kept, frozen and saved, and the merge."""

import copy
import io
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ao_lab
import fast
import reference
from ao_lab import (
    FqnToConfig,
    LoRA,
    QATConfig,
    QuantizedTensor,
    SchemeConfig,
    explain,
    lora_state_dict,
    quantize_,
)
from ao_lab.checkpoint.api import load_pretrained, save_pretrained
from ao_lab.qat.lora import LoRALinear
from tests.ao_lab.config.test_every_config import TOKENS, Net
from tests.ao_lab.qat.test_linear import gradients
from tests.support.models.qat_models import everything, linears, multiplied, same, steps

CONFIGS = {
    "int8 x int4": ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, kernel="dequantize"),
    "int8 x int8": ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "int4": ao_lab.Int4WeightOnlyConfig(group_size=32, kernel="dequantize"),
    "stretched": ao_lab.LowBitWeightOnlyConfig(bits=2, kernel="dequantize"),
    "nf4": ao_lab.NF4WeightOnlyConfig(kernel="dequantize"),
    "mxfp4": ao_lab.MXDynamicActivationMXWeightConfig(weight_dtype="float4_e2m1fn_x2", kernel="dequantize"),
    "nvfp4": ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(kernel="dequantize"),
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


# QAT with LoRA on models: saved and loaded, merged, rounded sums, shared weights, and what is refused.


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_and_loaded(name):
    """The whole state, by weights_only; and the adapters alone, which are small."""
    net = adapted(CONFIGS[name])
    y = net(TOKENS).detach()
    assert same(copy.deepcopy(net)(TOKENS), y)
    file, small = io.BytesIO(), io.BytesIO()
    torch.save(net.state_dict(), file)
    torch.save(lora_state_dict(net), small)
    state = [torch.load(io.BytesIO(one.getvalue()), weights_only=True) for one in (file, small)]
    assert isinstance(state[0]["first.weight"], QuantizedTensor)
    assert set(state[1]) == {
        f"{layer}.{part}" for layer in ("first", "second") for part in ("lora_a", "lora_b")
    }
    assert sum(part.nbytes for part in state[1].values()) == 2 * 4 * (128 + 256) * 2
    for one, strict in ((state[0], True), (state[1], False)):
        other = Net(torch.bfloat16)
        quantize_(other, QATConfig(CONFIGS[name], lora=LoRA(rank=4, alpha=8)))
        found = other.load_state_dict(one, strict=strict)
        assert found.unexpected_keys == []
        assert same(other(TOKENS), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_merged(name, dtype):
    """Step "convert" stores the reference's codes of the float32 sum; layers are plain, static scales stay."""
    net = adapted(CONFIGS[name], dtype)
    added = [
        2 * (one.lora_b.detach().float() @ one.lora_a.detach().float()) for one in (net.first, net.second)
    ]
    bases = [layer.weight.detach().dequantize(torch.float32) for layer in (net.first, net.second)]
    sums = [base + more for base, more in zip(bases, added, strict=True)]
    given = net.first.weight.input_scale
    seen = []
    report = quantize_(
        net, QATConfig(CONFIGS[name], step="convert"), progress=lambda *told: seen.append(told)
    )
    assert seen == [("first.weight", 1, 2), ("second.weight", 2, 2)]
    said = (
        r"trained by QAT, adapters merged; rounding the sums moved the weights by (\S+) times what the adapters had "
        r"added(.*)"
    )
    ((told, meant),) = {re.fullmatch(said, layer.reason).groups() for layer in report.changed}
    assert bool(meant) == (float(told) > 0.3)
    assert not meant or ("most of it from 1 on" in meant and "ao_lab.save_adapter" in meant)
    layers = (net.first, net.second)
    lost = [one.weight.dequantize().float() - dense for one, dense in zip(layers, sums, strict=True)]
    both = [sum(float(x.square().sum()) for x in parts) for parts in (lost, added)]
    assert float(told) == pytest.approx((both[0] / both[1]) ** 0.5, rel=0.06)  # two digits
    for layer, dense in zip((net.first, net.second), sums, strict=True):
        assert type(layer) is nn.Linear
        assert [key for key, _ in layer.named_parameters() if key.startswith("lora")] == []
        stored = layer.weight
        expected = reference.quantize(dense, stored.scheme, packed=stored.quantized.packed)
        for part in ("codes", "scale", "outer", "zero"):
            assert same(getattr(stored, part), getattr(expected, part)), part
        assert (stored.dtype, stored.requires_grad) == (dtype, False)
    assert same(net.first.weight.input_scale, given)
    assert net(TOKENS).isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_untrained_adapters_leave_the_codes(name):
    net = Net()
    quantize_(net, QATConfig(CONFIGS[name], lora=LoRA(rank=4)))
    y, before = net(TOKENS), net.first.weight
    quantize_(net, QATConfig(CONFIGS[name], step="convert"))
    assert same(net.first.weight.codes, before.codes)
    assert same(net.first.weight.scale, before.scale)
    assert same(net(TOKENS), y)


def test_saved_and_loaded_by_name(tmp_path):
    """Readers would lose the adapters, so the whole is not saved; the quantized base is, and adapters travel by themselves."""
    net = adapted(CONFIGS["int8 x int4"])
    with pytest.raises(ValueError, match=r"step='convert'"):
        save_pretrained(net, tmp_path / "made")
    base = Net(torch.bfloat16)
    quantize_(base, CONFIGS["int8 x int4"])
    save_pretrained(base, tmp_path / "base")
    other = load_pretrained(tmp_path / "base", Net(torch.bfloat16))
    quantize_(other, QATConfig(CONFIGS["int8 x int4"], lora=LoRA(rank=4, alpha=8)))
    other.load_state_dict(lora_state_dict(net), strict=False)
    assert same(other(TOKENS), net(TOKENS))


def test_adapters_come_after_all_layers_of_a_report():
    names = [layer.name for layer in explain(adapted(CONFIGS["int8 x int4"])).layers]
    adapters = [name for name in names if "lora" in name]
    assert adapters
    assert names[-len(adapters) :] == adapters


def test_converted_to_dense_layers():
    net = adapted(CONFIGS["int8 x int4"])
    wanted = net.first.merged().bfloat16()
    quantize_(net, QATConfig(step="convert"))
    assert type(net.first) is nn.Linear
    assert same(net.first.weight.detach(), wanted)
    assert explain(net).changed == ()


def by_default(config):
    """Trained with as F.linear multiplies, whatever kernel multiplies afterwards."""
    return replace(config, kernel="auto")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_of_a_rounded_sum_what_was_multiplied_is_what_is_stored(name, dtype):
    config = by_default(CONFIGS[name])
    net = adapted(config, dtype, SUM)
    net.table.requires_grad_(False)
    frozen = net.first.weight.detach().clone()
    steps(net)
    assert same(net.first.weight.detach(), frozen)
    assert [key for key, one in net.named_parameters() if one.requires_grad] == list(lora_state_dict(net))
    with multiplied() as operands, torch.no_grad():
        net(TOKENS)
    quantize_(net, QATConfig(config, step="convert"))
    for layer, (_, w) in zip((net.first, net.second), operands, strict=True):
        assert type(layer) is nn.Linear
        assert same(layer.weight.dequantize(), w)
        assert set(layer.__dict__) == set(nn.Linear(1, 1).__dict__)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sum_under_autocast_is_the_one_that_is_stored(compiled):
    layer = adapted(by_default(CONFIGS["int4"]), torch.float32, replace(SUM, dtype=torch.float32)).first
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    with multiplied() as operands, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        run(torch.randn(4, 128))
    stored = ao_lab.quantized(layer.merged().detach(), layer.qat.recipe)
    assert same(operands[-1][1], stored.dequantize(torch.bfloat16))


def test_gradients_of_a_rounded_sum():
    layer = adapted(CONFIGS["int4"], torch.float32, replace(SUM, dtype=torch.float32)).first
    x, g = numbers(6, 128, dtype=torch.float32), numbers(6, 256, seed=2, dtype=torch.float32)
    layer(x).backward(g)
    total = layer.merged().detach()
    dw = fast.fake_quantize_vjp(g.t() @ x, total, layer.qat.recipe.weight)[0]
    assert same(layer.lora_a.grad, 2 * layer.lora_b.detach().t() @ dw)
    assert same(layer.lora_b.grad, 2 * dw @ layer.lora_a.detach().t())
    assert layer.weight.grad is None


def test_weights_that_are_quantized_already_are_kept():
    """The second round: codes that QAT has trained, some of them moved by hand, are those that adapters stand beside."""
    config = CONFIGS["int8 x int4"]
    net = Net()
    quantize_(net, QATConfig(config))
    steps(net)
    quantize_(net, QATConfig(config, step="convert"))
    before, y = net.first.weight, net(TOKENS)
    report = quantize_(net, QATConfig(config, lora=LoRA(rank=4)))
    assert net.first.weight is before
    assert same(net(TOKENS), y)
    assert "rank 4" in report.changed[0].reason


def test_embeddings_and_rank_zero_are_frozen_alone():
    net = Net()
    layers = {"table": LoRA(rank=2), "first": LoRA(rank=0), "second": LoRA(rank=2)}
    config = ao_lab.Int8WeightOnlyConfig()
    quantize_(net, FqnToConfig({name: QATConfig(config, lora=lora) for name, lora in layers.items()}))
    assert [type(layer) for layer in (net.table, net.first, net.second)] == [
        nn.Embedding,
        nn.Linear,
        LoRALinear,
    ]
    assert [name for name, one in net.named_parameters() if one.requires_grad] == list(lora_state_dict(net))
    net(TOKENS).sum().backward()
    quantize_(net, QATConfig(config, step="convert"), everything)
    assert [type(layer) for layer in (net.table, net.first, net.second)] == [
        nn.Embedding,
        nn.Linear,
        nn.Linear,
    ]
    assert len(explain(net).changed) == 3


@pytest.mark.parametrize("lora", [LoRA(rank=2, alpha=8), replace(SUM, rank=2)], ids=["base", "sum"])
def test_a_weight_shared_with_an_embedding(lora):
    """One weight in both while adapters train; merged, the layer has its own, and the embedding what it had."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens))

    model, config = Tied(), ao_lab.Int8WeightOnlyConfig(kernel="dequantize")
    quantize_(model, QATConfig(config, lora=lora), everything)
    assert model.head.weight is model.table.weight
    before = model.table(TOKENS).detach()
    with torch.no_grad():
        model.head.lora_b.add_(0.5)
    model(TOKENS).sum().backward()
    quantize_(model, QATConfig(config, step="convert"), everything)
    assert model.head.weight is not model.table.weight
    assert same(model.table(TOKENS), before)
    assert len(explain(model).changed) == 2


def test_static_scales_of_inputs_are_found_with_data():
    config = ao_lab.Int8StaticActivationInt8WeightConfig()
    net, plain = Net(), Net()
    with pytest.raises(ValueError, match="needs calibration"):
        quantize_(net, QATConfig(config, lora=LoRA(rank=4)))
    assert type(net.first) is nn.Linear
    quantize_(net, QATConfig(config, lora=LoRA(rank=4)), forward_loop=lambda model: model(TOKENS))
    quantize_(plain, config, forward_loop=lambda model: model(TOKENS))
    assert same(net.first.weight.input_scale, plain.first.weight.input_scale)
    assert same(net(TOKENS), plain(TOKENS))


def test_on_the_meta_device():
    """Made without numbers, filled by load_state_dict."""
    config, full = CONFIGS["int8 x int4"], adapted(CONFIGS["int8 x int4"])
    with torch.device("meta"):
        net = Net()
    quantize_(net, QATConfig(config, lora=LoRA(rank=4, alpha=8)))
    assert net.first.lora_a.is_meta
    net.load_state_dict(full.state_dict(), assign=True)
    assert same(net(TOKENS), full(TOKENS))


REFUSED = {
    "rank": (lambda: LoRA(rank=-1), "rank is an integer, 0 or more"),
    "alpha": (lambda: LoRA(alpha=0), "alpha is a positive number"),
    "dropout": (lambda: LoRA(dropout=1), "a probability below 1"),
    "dtype": (lambda: LoRA(dtype=torch.int8), "adapters are bfloat16"),
    "rounds": (lambda: LoRA(rounds="both"), "rounds is one of base, sum"),
    "dropout of a sum": (lambda: LoRA(rounds="sum", dropout=0.1), "they have none"),
    "convert": (lambda: QATConfig(CONFIGS["int4"], step="convert", lora=LoRA()), "belong to step='prepare'"),
    "learned": (lambda: QATConfig(CONFIGS["int4"], lora=LoRA(), learn_scales=True), "leave learn_scales"),
    "late": (lambda: QATConfig(CONFIGS["int4"], lora=LoRA(), start_step=3), "frozen and quantized from the start"),
    "no base": (lambda: QATConfig(weight_config="int4_g32", lora=LoRA()), "by base_config"),
    "axis": (lambda: QATConfig(SchemeConfig(scheme="int8_rowwise", axis=-2), lora=LoRA()), "axis=-1; got axis=-2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_other_kinds_of_lora_are_refused():
    with pytest.raises(TypeError, match=r"an ao_lab\.LoRA, got int"):
        QATConfig(CONFIGS["int4"], lora=16)


def refused(net, config, message, filter_fn=None):
    before = [(type(layer), layer.weight) for layer in (net.first, net.second)]
    with pytest.raises(ValueError, match=message):
        quantize_(net, config, filter_fn)
    after = [(type(layer), layer.weight) for layer in (net.first, net.second)]
    assert all(a[0] is b[0] and a[1] is b[1] for a, b in zip(before, after, strict=True))


def test_states_that_do_not_fit_change_nothing():
    config, other = CONFIGS["int8 x int4"], CONFIGS["int4"]
    wanted = QATConfig(config, lora=LoRA(rank=4))
    net = Net()
    quantize_(net, FqnToConfig({"second": other}))
    refused(net, wanted, "second.weight is quantized as int4_g32_asymmetric, not as int4_g32 x")
    net = Net()
    quantize_(net, FqnToConfig({"second": QATConfig(config)}))
    refused(net, wanted, "second.weight is in dense QAT")
    net = adapted(config)
    refused(net, wanted, "first.weight has adapters already")
    refused(net, QATConfig(config), "already quantized")
    refused(
        net,
        QATConfig(other, step="convert"),
        "first.weight was trained on int4_g32 x .*, not int4_g32_asym",
    )
    refused(Net(), FqnToConfig({"first": wanted, "second": QATConfig(config)}), "lora in every QATConfig")
    refused(Net(), FqnToConfig({"first": wanted, "nothing": wanted}), "match nothing")
    refused(Net(), wanted, "none of the selected layers", lambda module, name: False)


def test_what_adapters_are_not_for_is_left():
    """Subclasses compute otherwise; blocks that do not divide a weight leave it dense."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(64, 64), Scaled(64, 64), nn.Linear(65, 64))
    quantize_(model, QATConfig(ao_lab.Int4WeightOnlyConfig(group_size=32), lora=LoRA(rank=2)))
    assert [type(layer) for layer in model] == [LoRALinear, Scaled, nn.Linear]
    reasons = {layer.name: layer.reason for layer in explain(model).layers}
    assert "a Scaled may compute otherwise" in reasons["1.weight"]
    assert "65" in reasons["2.weight"]
    assert reasons["0.lora_a"] == "it trains"


@pytest.mark.parametrize("rounds", ["base", "sum"])
def test_adapters_alone_train(rounds):
    """As in peft: norms, tables and heads beside them are frozen, unless the configuration leaves them."""

    def training(**options):
        net = nn.Sequential(nn.Embedding(8, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 8))
        lora = LoRA(rank=2, rounds=rounds, **options)
        quantize_(net, QATConfig(SchemeConfig(scheme="int8_rowwise"), lora=lora), lambda m, name: name == "2")
        return {name for name, parameter in net.named_parameters() if parameter.requires_grad}

    assert training() == {"2.lora_a", "2.lora_b"}
    rest = {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert training(freeze_rest=False) == {"2.lora_a", "2.lora_b", *rest}
    with pytest.raises(TypeError, match="freeze_rest is True or False"):
        LoRA(freeze_rest="norms")
