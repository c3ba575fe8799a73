"""Mixtures of experts of transformers: their batched weights quantized, in every way in which transformers multiplies them."""

import copy

import pytest
import torch

import ao_lab.tensor.preshuffled as rule
from ao_lab import QuantizedTensor, SchemeConfig, quantize_
from ao_lab.gemm import fused, select

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 32,
}  # fmt: skip
TOKENS = torch.arange(18).reshape(2, 9)
# Mixtral keeps (experts, out, in), GPT-OSS (experts, in, out): the axis of the blocks is that of the sum.
MODELS = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", -1),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", -2),
}

# What quantized experts are multiplied by: a gather of as many experts as there are, or more, becomes a product of groups.
PRODUCTS = {"eager": "eager", "grouped_mm": "grouped_mm", "batched_mm": "grouped_mm"}


def model_of(name, way):
    kind, config, axis = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**SIZES)).eval()
    model.set_experts_implementation(way)
    return model, axis


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("scheme", ["int8_rowwise", "mxfp4"])
def test_weights_alone_give_the_outputs_of_the_dequantized_model(name, way, scheme):
    model, axis = model_of(name, way)
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
        assert torch.equal(model(TOKENS).logits, dense(TOKENS).logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_inputs_are_quantized_in_every_way(name, way):
    """No way of multiplying leaves the inputs as they were."""
    model, axis = model_of(name, way)
    logits = []
    for activation in (None, "fp8_rowwise"):
        made = copy.deepcopy(model)
        config = SchemeConfig(scheme="mxfp4", activation_scheme=activation, axis=axis)
        quantize_(made, config, lambda module, path: path.endswith("experts"))
        with torch.no_grad():
            logits.append(made(TOKENS).logits)
    assert not torch.equal(*logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_preshuffled_experts_give_the_outputs_of_the_dequantized_model(name, way, monkeypatch):
    """Where they are stored along K, as Mixtral's; GPT-OSS's, stored along N, stay plain."""
    model, axis = model_of(name, way)
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
    model, axis = model_of("mixtral", "grouped_mm")
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
