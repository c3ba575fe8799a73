"""Decoding with transformers' quantized experts: where `generate` switches to "batched_mm", as on every device but the CPU, the
same grouped products run as before the switch."""

import contextlib
import copy
import json

import pytest
import torch

import ao_lab.tensor.metadata as rule
from ao_lab import QuantizedTensor, SchemeConfig, quantize_
from ao_lab.gemm import dense as fused
from ao_lab.gemm import select
from ao_lab.tensor import experts as gathered
from ao_lab.tensor import slicing
from tests.support.models.torch_products import by_torch

# Mixtures of experts of transformers: their batched weights quantized, in every way in which transformers multiplies them.

TRANSFORMERS_SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 32,
}  # fmt: skip
# Mixtral keeps (experts, out, in), GPT-OSS (experts, in, out): the axis of the blocks is that of the sum.
TRANSFORMERS_MODELS = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", -1),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", -2),
}

# What quantized experts are multiplied by: a gather of as many experts as there are, or more, becomes a product of groups.
PRODUCTS = {"eager": "eager", "grouped_mm": "grouped_mm", "batched_mm": "grouped_mm"}


def transformers_model_of(name, way):
    kind, config, axis = TRANSFORMERS_MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**TRANSFORMERS_SIZES)).eval()
    model.set_experts_implementation(way)
    return model, axis


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", sorted(TRANSFORMERS_MODELS))
@pytest.mark.parametrize("scheme", ["int8_rowwise", "mxfp4"])
def test_weights_alone_give_the_outputs_of_the_dequantized_model(name, way, scheme):
    model, axis = transformers_model_of(name, way)
    dense = copy.deepcopy(model)
    dense.set_experts_implementation(PRODUCTS[way])
    report = quantize_(
        model, SchemeConfig(scheme=scheme, axis=axis), lambda module, path: path.endswith("experts")
    )
    assert [layer.name.rsplit(".", 1)[-1] for layer in report.changed] == ["gate_up_proj", "down_proj"]
    for path, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            dense.get_parameter(path).data.copy_(parameter.dequantize())
    with torch.no_grad():
        assert torch.equal(by_torch(model)(TOKENS).logits, dense(TOKENS).logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", sorted(TRANSFORMERS_MODELS))
def test_inputs_are_quantized_in_every_way(name, way):
    """No way of multiplying leaves the inputs as they were."""
    model, axis = transformers_model_of(name, way)
    logits = []
    for activation in (None, "fp8_rowwise"):
        made = copy.deepcopy(model)
        config = SchemeConfig(scheme="mxfp4", activation_scheme=activation, axis=axis)
        quantize_(made, config, lambda module, path: path.endswith("experts"))
        with torch.no_grad():
            logits.append(made(TOKENS).logits)
    assert not torch.equal(*logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", sorted(TRANSFORMERS_MODELS))
def test_preshuffled_experts_give_the_outputs_of_the_dequantized_model(name, way, monkeypatch):
    """Where they are stored along K, as Mixtral's; GPT-OSS's, stored along N, stay plain."""
    model, axis = transformers_model_of(name, way)
    dense = copy.deepcopy(model.bfloat16())
    dense.set_experts_implementation(PRODUCTS[way])
    monkeypatch.setattr(rule, "has_kernels", lambda x: True)
    config = SchemeConfig(scheme="fp8_rowwise", axis=axis)
    quantize_(model, config, lambda module, path: path.endswith("experts"))
    layouts = set()
    for path, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            layouts.add(parameter.meta.layout)
            dense.get_parameter(path).data.copy_(parameter.dequantize())
    assert layouts == {"preshuffled" if axis == -1 else "plain"}
    # Of one row plain weights have a kernel on a CPU, which is not what dequantizes.
    monkeypatch.setitem(select.PRODUCTS, "fused", select.PRODUCTS["dequantize"])
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, dense(TOKENS).logits)


def test_grouped_products_of_mixtral_go_to_the_operator(monkeypatch):
    """Two of each layer, as transformers calls torch."""
    model, axis = transformers_model_of("mixtral", "grouped_mm")
    monkeypatch.setattr(rule, "has_kernels", lambda x: True)
    quantize_(
        model.bfloat16(),
        SchemeConfig(scheme="int8_rowwise", axis=axis),
        lambda m, path: path.endswith("experts"),
    )
    calls = []
    monkeypatch.setattr(fused, "groups_reason", lambda w, dtype: None)
    run = fused.grouped_linear_small
    monkeypatch.setattr(
        fused, "grouped_linear_small", lambda x, w, ends: calls.append(tuple(w.shape)) or run(x, w, ends)
    )
    with torch.no_grad():
        model(TOKENS)
    assert calls == [(4, 256, 128), (4, 128, 128)]


transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 32,
}  # fmt: skip
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 128}),
}
TOKENS = torch.arange(18).reshape(2, 9)


def model_of(name, scheme, dtype=torch.bfloat16):
    config, sizes = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SIZES, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype).eval()
    quantize_(model, SchemeConfig(scheme=scheme), lambda module, path: path.endswith("experts"))
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.fixture
def stored(monkeypatch):
    """Experts are preshuffled and multiplied as stored, as on Hopper; the list has the rows of each such product."""
    rows = []
    run = fused.grouped_linear_small

    def able(w, dtype):
        return None if w.meta.layout == "preshuffled" and w.meta.transposed else "not as stored"

    monkeypatch.setattr(rule, "has_kernels", lambda x: True)
    monkeypatch.setattr(fused, "groups_reason", able)
    monkeypatch.setattr(gathered, "groups_reason", able)
    monkeypatch.setattr(
        fused, "grouped_linear_small", lambda x, w, ends: rows.append(x.shape[0]) or run(x, w, ends)
    )
    return rows


def generated(model, tokens, switch):
    """Logits of each generated token; switch: decode as on a GPU."""

    @contextlib.contextmanager
    def decoding(self):
        self.set_experts_implementation("batched_mm" if switch else "grouped_mm")
        try:
            yield
        finally:
            self.set_experts_implementation("grouped_mm")

    kind = type(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "_optimize_model_for_decode", decoding)
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False, pad_token_id=0,
            eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return torch.stack(found.logits)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("scheme", ["int4_g128", "int8_rowwise"])
@pytest.mark.parametrize("batch", [1, 2])
def test_decoding_multiplies_experts_as_they_are_stored(stored, monkeypatch, name, scheme, batch):
    """By the products of "grouped_mm", bit for bit; nothing is gathered or made dense."""
    model, tokens = model_of(name, scheme), TOKENS[:batch]
    wanted = generated(model, tokens, switch=False)
    products = list(stored)
    stored.clear()

    def refused(*arguments, **options):
        raise AssertionError("experts are copied or made dense")

    monkeypatch.setattr(slicing, "select_rows", refused)
    monkeypatch.setattr(QuantizedTensor, "dequantize", refused)
    assert torch.equal(generated(model, tokens, switch=True), wanted)
    assert stored == products
    assert 2 * batch in products


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("scheme", ["nf4", "int4_g32", "mxfp4"])
def test_decoding_where_torch_multiplies_groups(name, scheme):
    """As many choices as there are experts: the products of "grouped_mm"; fewer: of the chosen experts alone."""
    model = model_of(name, scheme)
    assert torch.equal(generated(model, TOKENS, switch=True), generated(model, TOKENS, switch=False))
    few = generated(model, TOKENS[:1], switch=True)
    torch.testing.assert_close(few, generated(model, TOKENS[:1], switch=False), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_inputs_that_are_quantized_are_in_decoding(name):
    model = model_of(name, "mxfp4")
    plain = generated(model, TOKENS, switch=True)
    other = model_of(name, "mxfp4")
    for parameter in (p for p in other.parameters() if isinstance(p, QuantizedTensor)):
        parameter.meta = parameter.with_recipe(
            activation=SchemeConfig(scheme="fp8_rowwise").recipe().weight
        ).meta
    found = generated(other, TOKENS, switch=True)
    assert torch.equal(found, generated(other, TOKENS, switch=False))
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.nightly), "aot_eager"])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:1, :1]])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_in_one_graph(stored, backend, tokens, dynamic):
    model = model_of("mixtral", "int4_g128")
    with torch.no_grad():
        wanted = model(tokens).logits
        model.set_experts_implementation("batched_mm")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
        assert torch.equal(compiled(tokens).logits, wanted)


def test_a_compiled_program_gathers_no_codes(stored):
    """It sorts, multiplies by groups and puts back: twice, for both projections of the one layer that is looked at."""
    from torch._dynamo.backends.common import aot_autograd

    model, graphs = model_of("mixtral", "int4_g128"), []
    experts = model.model.layers[0].mlp.experts
    experts.config._experts_implementation = "batched_mm"
    numbers, shares = torch.tensor([[3, 1]]), torch.full((1, 2), 0.5, dtype=torch.bfloat16)
    compiler = aot_autograd(fw_compiler=lambda graph, inputs: graphs.append(graph) or graph)
    with torch.no_grad():
        torch._dynamo.reset()
        torch.compile(experts, backend=compiler, fullgraph=True)(
            torch.ones(1, 128, dtype=torch.bfloat16), numbers, shares
        )
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert names.count("ao_lab.grouped_linear_small.default") == 2
    assert names.count("aten.index.Tensor") == 4  # numbers and rows, of each projection
    assert not {name for name in names if "bmm" in name or ".item" in name or "nonzero" in name}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_compiled_grouped_products_in_other_dtypes(dtype):
    """transformers calls an operator of its own there."""
    model = model_of("mixtral", "int4_g32", dtype)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(TOKENS).logits, wanted)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "nf4"])
def test_a_saved_model_knows_nothing_of_it(tmp_path, scheme):
    model = model_of("mixtral", scheme)
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    wanted = generated(model, TOKENS, switch=True)
    assert (names, kinds) == (list(model.state_dict()), [type(module) for module in model.modules()])
    model.save_pretrained(tmp_path)
    assert not [key for key in json.loads((tmp_path / "config.json").read_text()) if "experts_impl" in key]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded.set_experts_implementation("grouped_mm")
    assert torch.equal(generated(loaded, TOKENS, switch=True), wanted)


def test_sentinels_of_expert_parallelism_add_nothing(stored):
    """Numbers beyond the experts, whose weights are zeros, in both ways of transformers."""
    model = model_of("mixtral", "int4_g128")
    experts = model.model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    numbers, shares = torch.tensor([[0, 4], [4, 4], [3, 1]]), torch.full((3, 2), 0.5).bfloat16()
    shares = shares.masked_fill(numbers == 4, 0)
    found = []
    for way in ("grouped_mm", "batched_mm"):
        experts.config._experts_implementation = way
        with torch.no_grad():
            found.append(experts(x, numbers, shares))
    assert torch.equal(*found)
    assert not found[0][1].any()
