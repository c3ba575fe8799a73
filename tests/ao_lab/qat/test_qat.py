"""`QATConfig` for every configuration: what training multiplies with is, bit for bit, what step "convert" stores."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

import ao_lab
import reference
from ao_lab import (
    FqnToConfig,
    LoRA,
    QATConfig,
    QuantizedTensor,
    explain,
    llama32_qat,
    lora_state_dict,
    quantize_,
)
from ao_lab.qat.lora import LoRALinear
from ao_lab.transforms.layers import rounded_buffers
from reference import SCHEMES, fake_quantize
from tests.ao_lab.config.test_every_config import CASES, TOKENS, Net, config_of
from tests.support.models.qat_models import everything, in_training, linears, multiplied, same, steps
from tests.support.models.torch_products import by_torch

# The published Llama 3.2 scheme on whole models: what each layer becomes, in both steps and both rounds.

IDS = torch.tensor([[1, 5, 9, 31, 2, 8], [7, 7, 0, 30, 12, 3]])
BLOCK = "int4_g32 x int8_rowwise_asymmetric"
HEAD, TABLE = "int8_rowwise x int8_rowwise_asymmetric", "int8_rowwise"


class Block(nn.Module):
    """Attention's and the feed-forward's linear layers, without attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.wqkv, self.wo = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, x):
        return x + self.feed_forward(self.wo(self.wqkv(self.norm(x))))


class TinyLlama(nn.Module):
    """The names of the authors' own code."""

    def __init__(self, tied):
        super().__init__()
        self.tok_embeddings = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(64)
        self.output = nn.Linear(64, 32, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def transformers_llama(tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS = {"tiny": TinyLlama, "transformers": transformers_llama}


def made(kind, tied, dtype=torch.float32):
    torch.manual_seed(0)
    return MODELS[kind](tied).to(dtype)


def logits(model, ids=IDS):
    y = model(ids)
    return getattr(y, "logits", y)


def train(model, rate=1e-2, count=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def schemes(model, tied):
    """The scheme of every layer by what it is for; ValueError where one is of no kind, or where one kind has two."""
    found = {}
    for layer in explain(model).changed:
        kind = "block" if "layers." in layer.name else "table" if layer.kind == "Embedding" else "head"
        found.setdefault(kind, set()).add(layer.scheme)
    # A tied weight brings the classifier's scheme for inputs, which an embedding ignores.
    return found == {"block": {BLOCK}, "head": {HEAD}, "table": {HEAD if tied else TABLE}}


def table_and_head(model):
    if isinstance(model, TinyLlama):
        return model.tok_embeddings, model.output
    return model.model.embed_tokens, model.lm_head


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", MODELS)
def test_both_rounds(kind, tied):
    """Dense QAT, the frozen backbone, adapters in the blocks, the merge: schemes, outputs and ties at every stage.

    Outputs are bit for bit those that were trained, where torch makes the sums in both.
    """
    model = made(kind, tied)
    blocks = 8 if kind == "tiny" else 14
    quantize_(model, llama32_qat())
    table, head = table_and_head(model)
    assert explain(model).changed == ()
    assert len(explain(model).left) == blocks + 2
    losses = train(model)
    assert losses[-1] < losses[0]
    model.eval()
    dense_head = head.weight.detach().clone()
    with torch.no_grad():
        looked_up, y = table(IDS), logits(model)
        quantize_(model, llama32_qat(step="convert"))
        assert schemes(model, tied)
        assert same(table(IDS), looked_up)
        assert same(logits(by_torch(model)), y)
        assert (head.weight is table.weight) == tied
        assert head.weight.scheme == SCHEMES["int8_rowwise"]
        assert head.weight.scale.shape == (32, 1)
        assert same(head.weight.dequantize(), fake_quantize(dense_head, "int8_rowwise"))

    model.requires_grad_(False)
    quantize_(model, llama32_qat(lora=LoRA(rank=4, alpha=4)))
    assert schemes(model, tied)
    assert same(logits(by_torch(model)), y)
    adapters = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert len(adapters) == blocks
    assert type(head) is nn.Linear
    assert [name for name, one in model.named_parameters() if one.requires_grad] == list(
        lora_state_dict(model)
    )
    model.train()
    losses = train(model, 1e-3)
    assert losses[-1] < losses[0]
    assert (head.weight is table.weight) == tied
    quantize_(model, llama32_qat(step="convert"))
    assert schemes(model, tied)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("kind", MODELS)
def test_from_dense_weights_with_adapters_at_once(kind):
    """The second round alone quantizes what is dense; and a whole model compiles."""
    model = made(kind, False, torch.bfloat16)
    quantize_(model, llama32_qat(lora=LoRA(rank=2, dropout=0.1)))
    assert schemes(model, False)
    model.eval()
    compiled = torch.compile(model, backend="aot_eager")
    assert same(logits(compiled), logits(model))
    torch.compiler.reset()


def test_rounded_sums_in_the_blocks():
    """What is trained is what is stored, in the whole model: outputs are equal bit for bit where torch multiplies."""
    model = made("tiny", False)
    quantize_(model, llama32_qat(lora=LoRA(rank=4, rounds="sum")))
    train(model)
    layer = model.layers[0].wo
    merged = layer.merged().detach()
    quantize_(model, llama32_qat(step="convert"))
    assert schemes(model, False)
    assert same(layer.weight.dequantize(), fake_quantize(merged, "int4_g32"))


def test_groups_of_another_size_and_learned_scales():
    model = made("tiny", False)
    quantize_(model, llama32_qat(group_size=64, learn_scales=True))
    assert model.layers[0].wo.qat_scale.shape == (64, 1)
    quantize_(model, llama32_qat(step="convert", group_size=64))
    assert model.layers[0].wo.weight.scheme.name == "int4_g64"


def test_a_model_of_other_names_is_refused():
    with pytest.raises(ValueError, match="match nothing; names are"):
        quantize_(nn.Sequential(nn.Linear(64, 64)), llama32_qat())


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "given"), CASES)
def test_what_was_multiplied_is_what_is_stored(name, given, dtype):
    config = config_of(name, given)
    net = in_training(config, dtype)
    steps(net)
    with multiplied() as operands, torch.no_grad():
        net(TOKENS)
    dense = [net.first.weight.detach().clone(), net.second.weight.detach().clone()]
    inputs = [net.first.given(), net.second.given()]
    quantize_(net, QATConfig(config, step="convert"))
    for layer, (_, w), before, static in zip((net.first, net.second), operands, dense, inputs, strict=True):
        stored = layer.weight
        assert type(layer) is nn.Linear
        assert isinstance(stored, QuantizedTensor)
        assert same(stored.dequantize(), w)
        expected = reference.quantize(before, config.recipe().weight, axis=-1, packed=stored.quantized.packed)
        for part in ("codes", "scale", "outer", "zero"):
            assert same(getattr(stored, part), getattr(expected, part)), part
        assert same(stored.input_scale, static.input_scale)
        assert same(stored.input_zero, static.input_zero)
    x = net.table(TOKENS).reshape(-1, 128).detach()
    if (scheme := config.recipe().activation) is not None:
        assert same(reference.fake_quantize(x, scheme, scales=net.first.weight.input_scales), operands[0][0])
    else:
        assert same(operands[0][0], x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "given"), CASES)
def test_outputs_are_equal_under_the_reference_kernel(name, given, dtype):
    """Layer by layer: both compute `reference.matmul` of the same stored operands."""
    config = replace(config_of(name, given), kernel="reference")
    net = in_training(config, dtype)
    steps(net, 1)
    with torch.no_grad():
        y = net(TOKENS)
        quantize_(net, QATConfig(config, step="convert"))
        assert same(net(TOKENS), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "given"), CASES)
def test_embeddings(name, given, dtype):
    config = config_of(name, given)
    net = Net(dtype)
    only = lambda module, name: isinstance(module, nn.Embedding)  # noqa: E731
    quantize_(net, QATConfig(config), only)
    steps(net, 1)
    rows = net.table(TOKENS).detach()
    dense = net.table.weight.detach().clone()
    quantize_(net, QATConfig(config, step="convert"), only)
    assert type(net.table) is nn.Embedding
    assert isinstance(net.table.weight, QuantizedTensor)
    assert same(net.table(TOKENS), rows)
    assert same(net.table.weight.dequantize(), reference.fake_quantize(dense, config.recipe().weight))


@pytest.mark.parametrize("kernel", ["int8", "scaled_mm"])
def test_a_named_kernel_computes_the_forward(kernel):
    """The integers or 8-bit floats are multiplied, as the converted layer multiplies them: the same bits."""
    config = ao_lab.Int8DynamicActivationInt8WeightConfig(kernel="int8")
    if kernel == "scaled_mm":
        rows = ao_lab.PerRow()
        config = ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=rows, kernel=kernel)
    net = in_training(config)
    assert net.first.weight.grad is None
    steps(net)
    y = net(TOKENS)
    quantize_(net, QATConfig(config, step="convert"))
    assert same(net(TOKENS), y.detach())


def test_state_and_identity_stay():
    net = Net(torch.float32)
    keys, parameters, modules = (
        list(net.state_dict()),
        dict(net.named_parameters()),
        dict(net.named_modules()),
    )
    quantize_(net, QATConfig(ao_lab.Int4WeightOnlyConfig(group_size=32)), everything)
    assert list(net.state_dict()) == keys
    assert all(parameters[name] is now for name, now in net.named_parameters())
    assert all(modules[name] is now for name, now in net.named_modules())
    assert isinstance(net.first, nn.Linear)
    assert isinstance(net.table, nn.Embedding)
    other = Net(torch.float32)
    other.load_state_dict(net.state_dict())
    text = repr(net)
    assert "QATLinear(in_features=128" in text
    assert "int4_g32_asymmetric" in text
    twin = copy.deepcopy(net)
    assert same(twin(TOKENS), net(TOKENS))
    assert twin.first.weight is not net.first.weight
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False)(TOKENS), net(TOKENS))


def test_explain_and_reports():
    net = Net(torch.float32)
    report = quantize_(net, QATConfig(ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)))
    reasons = {layer.name: layer.reason for layer in report.layers}
    assert reasons["first.weight"].startswith("QAT: trained as int4_g32 x int8_rowwise_asymmetric")
    assert report.changed == ()
    assert str(explain(net)) == str(report)
    assert reasons["table.weight"] == "Embedding: by default (no filter_fn) only nn.Linear"
    seen = []
    report = quantize_(
        net,
        QATConfig(ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4), step="convert"),
        progress=lambda *told: seen.append(told),
    )
    assert seen == [("first.weight", 1, 2), ("second.weight", 2, 2)]
    assert [layer.reason for layer in report.changed] == ["trained by QAT"] * 2
    assert report.left[0].reason == reasons["table.weight"]


def test_a_prepared_model_reads_as_prepared():
    """Its report does not read as a failure of step "prepare"."""
    net, config = Net(), ao_lab.Int8WeightOnlyConfig()
    lines = str(quantize_(net, QATConfig(config))).splitlines()
    assert lines[0] == "2 of 3 layers prepared for QAT"
    assert lines[-1].startswith("  on a CPU a step takes up to several times as long as without QAT")
    assert [line.split()[1].rstrip(":") for line in lines[1:-1]] == ["left", "prepared", "as"]  # as above
    assert str(quantize_(net, QATConfig(config, step="convert"))).startswith("2 of 3 layers quantized\n")
    report = quantize_(Net(), QATConfig(config, lora=ao_lab.LoRA(4)))
    assert str(report).startswith("2 of 3 layers quantized, 2 of 3 layers prepared with adapters\n")


def test_reports_name_learned_scales():
    net = in_training(ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(32)), learn_scales=True)
    reasons = {layer.name: layer.reason for layer in explain(net).layers}
    assert reasons["first.qat_scale"] == "learned by QAT in addition to the weight"
    assert reasons["first.weight"].startswith("QAT: trained as int4_g32, scales learned")


def test_names_choose_configurations():
    def both(step):
        first, second = ao_lab.Int4WeightOnlyConfig(group_size=32), ao_lab.MXWeightOnlyConfig()
        return FqnToConfig({"first": QATConfig(first, step=step), "re:sec.*": QATConfig(second, step=step)})

    net = Net(torch.float32)
    quantize_(net, both("prepare"))
    assert (net.first.qat.recipe.weight.name, net.second.qat.recipe.weight.name) == (
        "int4_g32_asymmetric",
        "mxfp8_e4m3_rceil",
    )
    steps(net)
    quantize_(net, both("convert"))
    assert net.second.weight.scheme.name == "mxfp8_e4m3_rceil"
    mixed = FqnToConfig(
        {"first": QATConfig(ao_lab.NF4WeightOnlyConfig()), "second": ao_lab.NF4WeightOnlyConfig()}
    )
    with pytest.raises(ValueError, match="NF4WeightOnlyConfig and QATConfig do different things"):
        quantize_(Net(), mixed)


def test_a_shared_weight_stays_shared():
    net = Net(torch.float32)
    net.head = nn.Linear(128, 16, bias=False)
    net.head.weight = net.table.weight
    config = ao_lab.Int8DynamicActivationInt8WeightConfig(kernel="reference")
    quantize_(net, QATConfig(config, learn_scales=True), everything)
    assert net.head.weight is net.table.weight
    assert net.head.qat_scale is net.table.qat_scale
    assert net.table.qat.recipe.activation is None
    assert net.head.qat.recipe.activation is not None
    net(TOKENS)
    y = net.head(net.table(TOKENS)).detach()
    quantize_(net, QATConfig(config, step="convert"))
    assert net.head.weight is net.table.weight
    assert isinstance(net.head.weight, QuantizedTensor)
    assert same(net.head(net.table(TOKENS)), y)
    assert "table.qat_scale" not in net.state_dict()


def counting():
    """A model that counts steps, and in which two layers share a weight and its count."""
    net = Net(torch.float32)
    net.head = nn.Linear(128, 16, bias=False)
    net.head.weight = net.table.weight
    quantize_(net, QATConfig(ao_lab.Int8WeightOnlyConfig(), start_step=2), everything)
    return net


def counted(net):
    return [int(layer.qat_step) for layer in (net.head, net.table, net.first)]


def test_a_shared_weight_counts_each_step_once():
    net = counting()
    loaded = copy.deepcopy(net)
    loaded.load_state_dict(loaded.state_dict(), assign=True)
    assert loaded.head.qat_step is not loaded.table.qat_step
    for model in (net, copy.deepcopy(net), loaded):
        ao_lab.advance_qat(model)
        assert counted(model) == [1, 1, 1]


def test_steps_of_a_model_that_nobody_prepared_are_a_warning():
    with pytest.warns(UserWarning, match="advance_qat: no layer of the model is prepared for QAT"):
        ao_lab.advance_qat(torch.nn.Linear(32, 32))


def test_counts_without_memory_are_told_apart_as_objects():
    """All of them have the address 0; a tensor's version says how often it was written."""
    net = counting().to("meta")
    net.head.qat_step = net.table.qat_step
    before = [layer.qat_step._version for layer in (net.table, net.first)]
    ao_lab.advance_qat(net)
    assert [layer.qat_step._version for layer in (net.table, net.first)] == [n + 1 for n in before]


def test_dense_again():
    net = in_training(ao_lab.Int4WeightOnlyConfig(group_size=32))
    weight = net.first.weight
    report = quantize_(net, QATConfig(step="convert"))
    assert type(net.first) is nn.Linear
    assert net.first.weight is weight
    assert weight.requires_grad
    assert {layer.reason for layer in report.left} >= {"QAT ended; dense again"}


def test_earlier_names():
    config = ao_lab.IntXQuantizationAwareTrainingConfig(
        ao_lab.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        ao_lab.IntxFakeQuantizeConfig(torch.int4, group_size=32),
    )
    recipe = ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4).recipe()
    assert config.recipe() == recipe
    assert config.step == "prepare"
    assert ao_lab.FakeQuantizeConfig is ao_lab.IntxFakeQuantizeConfig
    assert ao_lab.FromIntXQuantizationAwareTrainingConfig() == QATConfig(step="convert")
    float8 = QATConfig(weight_config=ao_lab.Float8FakeQuantizeConfig())
    assert float8.recipe().weight.name == "fp8_rowwise"
    net = Net(torch.float32)
    quantize_(net, config, linears)
    quantize_(net, ao_lab.FromIntXQuantizationAwareTrainingConfig())
    quantize_(net, ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4))
    assert isinstance(net.first.weight, QuantizedTensor)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_converted_model_in_bfloat16_computes_what_is_loaded(tmp_path):
    """The lines of the guide: a cast of the model rounds the frequencies of its rotary embedding, which no file holds."""
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    model = transformers_llama(True).eval()
    config = ao_lab.Int8DynamicActivationIntxWeightConfig("int4", ao_lab.PerGroup(32))
    quantize_(model, QATConfig(config := config.for_layout("compressed-tensors"), step="prepare"))
    own = model.model.rotary_emb.inv_freq.clone()
    quantize_(model.to(torch.bfloat16), QATConfig(config, step="convert"))
    assert torch.equal(model.model.rotary_emb.inv_freq, own)
    ao_lab.save_pretrained(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(ao_lab.load_pretrained(tmp_path)(IDS).logits, model(IDS).logits)
    model.model.rotary_emb.inv_freq = (
        own.bfloat16() * 2
    )  # values of its own: not the cast of what the class computes
    assert [name for _, name, _ in rounded_buffers(model)] == []


def test_buffers_that_loaders_make_in_the_models_dtype_are_not_rounded_ones():
    """A loader of a bfloat16 model has torch's default dtype so; float32 here would meet bfloat16 weights."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(3) / 3, persistent=False)
            self.register_buffer("own", torch.ones(3, dtype=torch.float32) / 3, persistent=False)

    Table.__module__ = "transformers.models.table"
    found = [(name, value.dtype) for _, name, value in rounded_buffers(nn.Sequential(Table()).bfloat16())]
    assert found == [("own", torch.float32)]
    assert torch.get_default_dtype() == torch.float32
