"""Tiny random models of transformers, and what tests of `from_pretrained` compare."""

import torch
from torch import nn

from ao_lab import QuantizedTensor, SchemeConfig, quantize_
from ao_lab.transforms.layers import linear_and_experts
from tests.ao_lab.quantization.test_models import MODELS, transformers

KINDS = (
    "LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "WhisperForConditionalGeneration", "MixtralForCausalLM",
    "Qwen2MoeForCausalLM", "GptOssForCausalLM", "ViTForImageClassification", "T5ForConditionalGeneration",
)  # fmt: skip
MORE = {
    "MixtralForCausalLM": (
        {**MODELS["LlamaForCausalLM"][0], "num_local_experts": 4},
        {"input_ids": torch.arange(18)[None]},
    )
}


def dense_model(kind, dtype=torch.float32, **fields):
    """A model of a class, with the same numbers each time, and inputs for it."""
    given, inputs = (MORE.get(kind) or MODELS[kind])[:2]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class._from_config(model_class.config_class(**{**given, **fields}), dtype=dtype).eval()
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    return model, inputs


def everything(module, name):
    """Tables too."""
    return isinstance(module, nn.Embedding) or linear_and_experts(module, name)


def quantized_model(kind, scheme, activation=None, accepts=linear_and_experts, **fields):
    """A model of a class, its weights in a scheme, and inputs for it."""
    model, inputs = dense_model(kind, **fields)
    quantize_(model, SchemeConfig(scheme=scheme, activation_scheme=activation), accepts)
    return model, inputs


def assert_same_weights(one, two):
    """Parameters and buffers by type, dtype, description and bits; which are one tensor."""
    first, second = (
        {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())} for m in (one, two)
    )
    assert first.keys() == second.keys()
    for name, a in first.items():
        b = second[name]
        assert (type(a), a.dtype, a.device) == (type(b), b.dtype, b.device), name
        if not isinstance(a, QuantizedTensor):
            assert torch.equal(a, b), name
            continue
        assert a.meta == b.meta, name
        assert not b.requires_grad
        for part, value in a.parts.items():
            other = b.parts[part]
            assert (value is None) == (other is None), (name, part)
            assert value is None or (value.dtype == other.dtype and torch.equal(value, other)), (name, part)
    assert [first[a] is first[b] for a in first for b in first] == [
        second[a] is second[b] for a in second for b in second
    ]


def outputs(model, inputs):
    """What a model says, without gradients."""
    with torch.no_grad():
        outputs = model(**inputs)
    return outputs.logits if hasattr(outputs, "logits") else outputs[0]
