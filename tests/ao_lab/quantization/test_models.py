"""Models of transformers with unusual modules, tiny and random: every layer accounted for, outputs, saving and loading."""

import copy

import pytest
import torch
from torch import nn

from ao_lab import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    MXDynamicActivationMXWeightConfig,
    NF4WeightOnlyConfig,
    QuantizedTensor,
    SchemeConfig,
    explain,
    load_pretrained,
    quantize_,
    quantize_pretrained,
    save_pretrained,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

TOKENS = torch.arange(18).reshape(2, 9)
TEXT = {"input_ids": TOKENS}
PAIR = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)}
SOUND = {"input_features": torch.linspace(-1, 1, 2 * 16 * 32).reshape(2, 16, 32), "decoder_input_ids": TOKENS}
WAVE = {"input_values": torch.linspace(-1, 1, 2 * 400).sin().reshape(2, 400)}
BASE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GROUPED = {**BASE, "num_key_value_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
#: Model, its configuration, its inputs, and what is left with which reason where everything is asked for.
MODELS = {
    "LlamaForCausalLM": (GROUPED, TEXT, {}),
    # Experts: batched (experts, out, in), or (experts, in, out).
    "Qwen2MoeForCausalLM": (
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "shared_expert_intermediate_size": 64},
        TEXT, {},
    ),
    "GptOssForCausalLM": ({**GROUPED, "num_local_experts": 4, "head_dim": 32}, TEXT, {}),
    "Llama4ForCausalLM": (
        {**GROUPED, "intermediate_size_mlp": 256, "num_local_experts": 4, "head_dim": 32, "num_experts_per_tok": 1}, TEXT, {},
    ),
    # Low-rank projections, a router that is no nn.Linear, one dense layer before the experts.
    "DeepseekV3ForCausalLM": (
        {**BASE, "num_hidden_layers": 2, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 64, "n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 32,
         "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        TEXT, {},
    ),
    # Conv1D: linear layers that are stored as (in, out); a head that is the table.
    "GPT2LMHeadModel": ({"vocab_size": 256, "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 64, **ENDS}, TEXT, {}),
    # A decoder tied to the table.
    "BertForMaskedLM": (BASE, TEXT, {}),
    # One table for encoder, decoder and head.
    "T5ForConditionalGeneration": (
        {"vocab_size": 256, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4,
         "decoder_start_token_id": 0},
        PAIR, {},
    ),
    # A subclass of nn.Linear with a forward of its own.
    "FalconForCausalLM": (BASE, TEXT, {}),
    "BloomForCausalLM": ({"vocab_size": 256, "hidden_size": 128, "n_layer": 1, "n_head": 4, **ENDS}, TEXT, {}),
    # Convolutions; positions that are read as rows of a table.
    "WhisperForConditionalGeneration": (
        {"vocab_size": 256, "d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "num_mel_bins": 16,
         "max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 0, **ENDS},
        SOUND, {"model.decoder.embed_positions.weight": "does not read its table"},
    ),
    # Parameters with three axes that are no experts.
    "ViTForImageClassification": (
        {**SMALL, "image_size": 32, "patch_size": 8}, IMAGE,
        {"vit.embeddings.cls_token": "not a batch of experts", "vit.embeddings.position_embeddings": "not a batch of experts"},
    ),
    "CLIPVisionModelWithProjection": ({**SMALL, "image_size": 32, "patch_size": 8, "projection_dim": 64}, IMAGE, {}),
    # A weight that multiplies a batch from the left, outside of its layer.
    "MambaForCausalLM": (
        {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 1, "state_size": 16, "time_step_rank": 32}, TEXT, {},
    ),
    "Mamba2ForCausalLM": (
        {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 1, "state_size": 16, "num_heads": 8,
         "head_dim": 32, "n_groups": 2},
        TEXT, {},
    ),
    # Tables of several layers in one; weights that a step of the forward scales.
    "Gemma3nForCausalLM": (
        {**GROUPED, "head_dim": 32, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32,
         "num_kv_shared_layers": 0, "laurel_rank": 32, "intermediate_size": [256], "activation_sparsity_pattern": [0.0],
         "layer_types": ["full_attention"]},
        TEXT, {},
    ),
    # A convolution whose weight is a parametrization.
    "Wav2Vec2ForCTC": (
        {**SMALL, "vocab_size": 32, "conv_dim": (32, 32), "conv_kernel": (3, 3), "conv_stride": (2, 2),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        WAVE, {"original0": "a parametrization", "original1": "a parametrization"},
    ),
    "OPTForCausalLM": (
        {"vocab_size": 256, "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 64, **ENDS},
        TEXT, {},
    ),
    # Attention and convolutions in turn.
    "Lfm2ForCausalLM": ({**GROUPED, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, TEXT, {}),
}  # fmt: skip
#: Models whose batched experts are (experts, in, out): blocks run along the axis of the sum.
IN_OUT = ("GptOss", "Llama4")
#: By the kernel whose sums are those of the dense model; "fused" adds the same products in another order.
WEIGHT_ONLY = [
    Int4WeightOnlyConfig(group_size=32, kernel="dequantize"),
    NF4WeightOnlyConfig(kernel="dequantize"),
    SchemeConfig(scheme="int8_rowwise", kernel="dequantize"),
]
DYNAMIC = [Int8DynamicActivationInt8WeightConfig(), MXDynamicActivationMXWeightConfig()]
KNOWN = {}


def dense_model(name):
    """The model, made once; and its outputs."""
    if name not in KNOWN:
        transformers.utils.logging.disable_progress_bar()
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**MODELS[name][0])).eval()
        KNOWN[name] = model, outputs(model, name)
    model, y = KNOWN[name]
    return copy.deepcopy(model), y


def outputs(model, name):
    with torch.no_grad():
        made = model(**MODELS[name][1])
    return getattr(made, "logits", made[0])


def matrices(model):
    """Full names of all that one would expect to be quantized, or to hear about."""
    names = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            plain = type(module).__name__ == "Conv1D" or isinstance(module, (nn.Linear, nn.Embedding))
            if (plain and name == "weight") or (
                parameter.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd)
            ):
                names.add(f"{path}.{name}")
    return names


def assert_accounted_for(model, report):
    """Each weight is changed or left with a reason, and what the report says is so.

    What a filter accepts and is no layer (convolutions, routers) is listed beside.
    """
    changed = {layer.name for layer in report.changed}
    others = {layer.name for layer in report.layers} - matrices(model)
    assert matrices(model) <= {layer.name for layer in report.layers}
    assert not others & changed
    assert all(layer.reason for layer in report.layers)
    assert changed == {
        n for n, p in model.named_parameters(remove_duplicate=False) if isinstance(p, QuantizedTensor)
    }
    assert explain(model) == report


def with_values(dense, model):
    """The dense model with the values that the quantized weights stand for, shared where they are."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, QuantizedTensor):
            path, _, leaf = name.rpartition(".")
            setattr(
                dense.get_submodule(path), leaf, nn.Parameter(parameter.dequantize(), requires_grad=False)
            )
    return dense


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("config", WEIGHT_ONLY, ids=lambda config: config.recipe().weight.name)
def test_weights_alone_give_the_outputs_of_their_values(name, config):
    model, y = dense_model(name)
    report = quantize_(model, config)
    assert_accounted_for(model, report)
    assert len(report.changed) >= 3
    made = outputs(model, name)
    assert torch.equal(made, outputs(with_values(dense_model(name)[0], model), name))
    assert not torch.equal(made, y)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_everything_that_can_be(name):
    """Embeddings and experts, too; what is left is so for a stated reason."""
    model, y = dense_model(name)
    axis = -2 if name.startswith(IN_OUT) else -1
    if axis == -2:
        quantize_(
            model, SchemeConfig(scheme="int8_rowwise", axis=-2), lambda m, path: path.endswith("experts")
        )
    config = SchemeConfig(scheme="int8_rowwise", kernel="dequantize")
    report = quantize_(model, config, lambda m, path: True)
    assert_accounted_for(model, report)
    expected = MODELS[name][2]
    left = [layer for layer in report.left if layer.name in matrices(model)]
    assert len(left) == len(expected)
    for end, reason in expected.items():
        assert [reason in layer.reason for layer in left if layer.name.endswith(end)] == [True]
    made = outputs(model, name)
    assert torch.equal(made, outputs(with_values(dense_model(name)[0], model), name))
    assert (made - y).norm() < 0.1 * y.norm()


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("config", DYNAMIC, ids=lambda config: str(config.recipe()))
def test_inputs_too_then_saved_and_loaded(name, config, tmp_path):
    model, y = dense_model(name)
    report = quantize_(model, config)
    assert_accounted_for(model, report)
    made = outputs(model, name)
    assert made.isfinite().all()
    assert not torch.equal(made, y)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path, dense_model(name)[0])
    assert torch.equal(outputs(again, name), made)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_quantized_while_loading(name, tmp_path):
    """Through transformers' own folder, whatever it renames, merges and ties."""
    model, _ = dense_model(name)
    model.save_pretrained(tmp_path)
    config = Int4WeightOnlyConfig(group_size=32)
    made = quantize_pretrained(tmp_path, config)
    other = type(model).from_pretrained(tmp_path, dtype="auto")
    report = quantize_(other, config)
    assert explain(made) == report
    for path, parameter in other.named_parameters(remove_duplicate=False):
        assert torch.equal(made.get_parameter(path), parameter), path
    assert torch.equal(outputs(made, name), outputs(other, name))


def test_conv1d_is_stored_as_the_linear_layer_that_it_is():
    """The weight (in, out) has the parts of (out, in), so that the same kernels and layouts serve it."""
    layer = transformers.pytorch_utils.Conv1D(64, 128)
    linear = nn.Linear(128, 64)
    linear.weight, linear.bias = nn.Parameter(layer.weight.detach().t().contiguous()), layer.bias
    x = torch.randn(3, 5, 128)
    for each in (layer, linear):
        report = quantize_(each, DYNAMIC[0])
    assert report.changed[0].kernel == explain(layer).changed[0].kernel == "int8"
    assert layer.weight.shape == (128, 64)
    assert torch.equal(layer.weight.codes, linear.weight.codes)
    assert torch.equal(layer(x), linear(x))


def test_a_parametrized_layer_is_left_with_a_reason():
    layer = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    report = quantize_(layer, DYNAMIC[0])
    assert [x.name for x in report.changed] == ["1.weight"]
    assert [x.name for x in report.left] == [f"0.parametrizations.weight.original{i}" for i in (0, 1)]
    assert layer(torch.randn(2, 64)).isfinite().all()
