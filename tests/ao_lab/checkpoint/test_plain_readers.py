"""Folders with packed zero points or float32 scales: plain transformers has the weights' values, or nothing is written."""

import json
import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from torch import nn

import ao_lab
from ao_lab import (
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    QuantizedTensor,
    SchemeConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from ao_lab import save_pretrained as save
from ao_lab.checkpoint.export import export_of, quantization_config
from ao_lab.checkpoint.plain_readers import flat_inputs, grouped, unsupported_reasons
from ao_lab.config.recipe import Recipe, named
from tests.ao_lab.checkpoint.vllm_rules import RULES, refused_by_vllm, vllm_rule
from tests.ao_lab.config.test_every_config import ARGUMENTS
from tests.ao_lab.quantization.test_models import MODELS
from tests.support.models.torch_products import by_torch

# Layers whose inputs have two axes: transformers finds one scale for all their tokens, unless groups as long as a row have one.

pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
CONFIG = Int8DynamicActivationInt8WeightConfig().for_layout("compressed-tensors")
INPUT_RANK_SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def opt():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **INPUT_RANK_SIZES, ffn_dim=128, max_position_embeddings=32, word_embed_proj_dim=64
    )
    return transformers.OPTForCausalLM(config)


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(**INPUT_RANK_SIZES, intermediate_size=128, max_position_embeddings=32)
    return transformers.BertForSequenceClassification(config)


def linears(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(
    ("make", "flat"), [(opt, ["fc1", "fc2"]), (classifier, ["bert.pooler.dense", "classifier"])]
)
def test_flat_layers_are_found_and_described_by_groups(make, flat, tmp_path):
    """Their tokens have scales of their own in plain transformers, too."""
    model = make().train()
    inner = [name for name in linears(model) if name != "lm_head"]
    found, unseen = flat_inputs(model, inner)
    assert [name.rsplit(".", 1)[-1] if make is opt else name for name in found] == flat
    assert unseen == []
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    quantize_(model, CONFIG, lambda module, name: name in inner)
    saved = save_pretrained(model.eval(), tmp_path)
    assert saved.layout == "compressed-tensors"
    assert any("two axes" in limit and found[0] in limit for limit in saved.limits)
    assert any("two axes" in line for line in (tmp_path / "README.md").read_text().splitlines())
    again = load_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7], [8, 9, 3], [90, 2, 4]])
    with torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(again(ids).logits, wanted)
        assert torch.equal(read(ids).logits, wanted)


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "WhisperForConditionalGeneration", "ViTForImageClassification"]
)
def test_models_of_other_inputs_are_reached(name):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name][0]))
    _, unseen = flat_inputs(model, linears(model))
    assert unseen == []


def test_models_of_ones_own_are_not_run():
    assert flat_inputs(nn.Sequential(nn.Linear(4, 4)), ["0"]) is None


COMPRESSED = "compressed-tensors"
BF16, F32 = torch.bfloat16, torch.float32
SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12)
GATE = ".gate_proj"


def inner(module, name):
    return isinstance(module, nn.Linear) and "head" not in name


def every(module, name):
    return isinstance(module, nn.Linear)


def scheme(name):
    return SchemeConfig(scheme=name)


def made(config, dtype=BF16, filter_fn=inner, **sizes):
    torch.manual_seed(0)
    config_of = transformers.LlamaConfig(**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config_of).to(dtype).eval()
    quantize_(model, config, None if isinstance(config, FqnToConfig) else filter_fn)
    return model


def field(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"].get("dequantize")


def values(model):
    """Every parameter as numbers of the model's dtype; of a folder that keeps codes, those of its first forward pass."""
    with torch.no_grad():
        model(TOKENS)
    quantized = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    dense = {name: p.detach() for name, p in model.named_parameters() if name not in quantized}
    return dense | {name: t.dequantize(model.dtype) for name, t in quantized.items()}


def read_alike(folder, model):
    """Whether plain transformers has the model's values, and `load_pretrained` its codes, scales and zero points."""
    theirs = values(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())
    for name, wanted in values(model).items():
        assert theirs[name].dtype == wanted.dtype, name
        assert torch.equal(theirs[name], wanted), name
    again = dict(load_pretrained(folder).named_parameters())
    for name, t in model.named_parameters():
        if isinstance(t, QuantizedTensor):
            parts = again[name].parts
            assert all(p is None or torch.equal(p, parts[key]) for key, p in t.parts.items()), name


#: The configuration, the filter, and sizes: lengths of groups, rows that fill no words, widths, a head that was tied.
READ = {
    "groups of 128": (Int4WeightOnlyConfig(group_size=128), inner, {}),
    "groups of 64": (Int4WeightOnlyConfig(group_size=64), inner, {"hidden_size": 256}),
    "groups of 32": (Int4WeightOnlyConfig(group_size=32), inner, {}),
    "100 rows": (Int4WeightOnlyConfig(group_size=32), lambda m, name: GATE in name, {"intermediate_size": 100}),
    "12 rows": (Int4WeightOnlyConfig(group_size=32), lambda m, name: GATE in name, {"intermediate_size": 12}),
    "8 rows, one group": (scheme("int4_rowwise_asymmetric"), lambda m, name: GATE in name, {"intermediate_size": 8}),
    "symmetric": (scheme("int4_g128"), inner, {}),
    "int3": (scheme("int3_g32_asymmetric"), inner, {}),
    "int8 groups": (scheme("int8_g32_asymmetric"), inner, {}),
    "int8 rows": (scheme("int8_rowwise_asymmetric"), inner, {}),
    "fp8": (scheme("fp8_rowwise"), inner, {}),
    "head": (Int4WeightOnlyConfig(group_size=32), every, {}),
    "tied head": (Int4WeightOnlyConfig(group_size=32), every, {"tie_word_embeddings": True}),
    "two alike": (FqnToConfig({"re:.*q_proj": scheme("int4_g32_asymmetric"),
        "re:.*k_proj": SchemeConfig(scheme="int4_g32_asymmetric", kernel="dequantize")}), None, {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", READ)
def test_plain_transformers_has_the_values(name, dtype, tmp_path):
    config, filter_fn, sizes = READ[name]
    model = made(config, dtype, filter_fn, **sizes)
    saved = save(model, tmp_path, layout=COMPRESSED)
    read_alike(tmp_path, model)
    zeros = any(t.zero is not None for t in model.parameters() if isinstance(t, QuantizedTensor))
    assert field(tmp_path) == (True if zeros or dtype == BF16 else None)
    assert any("dequantize: config.json" in line for line in saved.limits) == bool(field(tmp_path))
    assert not any("several schemes" in line for line in saved.limits)


@pytest.mark.parametrize(
    "config", [Int4WeightOnlyConfig(group_size=128), scheme("int8_rowwise"), scheme("mxfp4")]
)
def test_what_is_read_as_it_is_does_not_ask(config, tmp_path):
    model = made(config.for_layout(COMPRESSED))
    save(model, tmp_path, layout=COMPRESSED)
    assert field(tmp_path) is None
    read_alike(tmp_path, model)


#: The configuration, the dtype and sizes, the weight that the error names, and its rule.
REFUSED = {
    "8 rows": (Int4WeightOnlyConfig(group_size=32), BF16, {"intermediate_size": 8}, "mlp.gate_proj.weight", "of 8 rows"),
    "zero points that are numbers": (scheme("torchao.int4_g32_tinygemm"), BF16, {}, "mlp.gate_proj.weight", "no format"),
    "bfloat16 scales": (scheme("int4_g32_asymmetric_bf16"), F32, {}, "mlp.gate_proj.weight", "dtype of their scales, bfloat16"),
    "two schemes": (FqnToConfig({"re:.*q_proj": scheme("int4_g32"), "re:.*k_proj": scheme("int4_g32_asymmetric")}), BF16, {},
        "self_attn.k_proj.weight", "scheme of the first"),
    "inputs elsewhere": (FqnToConfig({"re:.*k_proj": scheme("int4_g32_asymmetric"),
        "re:.*q_proj": SchemeConfig(scheme="int8_rowwise_cast", activation_scheme="compressed_tensors.int8_token")}), BF16, {},
        "self_attn.k_proj.weight", "inputs of some layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_plain_transformers_cannot_read_is_refused_before_a_file_is_written(name, tmp_path):
    config, dtype, sizes, weight, rule = REFUSED[name]
    model = made(config, dtype, lambda m, path: GATE in path, **sizes)
    with pytest.raises(ValueError, match=rule) as error:
        save(model, tmp_path / "out", layout=COMPRESSED)
    assert f"model.layers.0.{weight}: " in str(error.value)
    assert 'for_layout("compressed-tensors")' in str(error.value)
    assert 'layout="ao_lab"' in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(scheme("int4_g32_asymmetric_bf16"), BF16), (Int4WeightOnlyConfig(group_size=128), F32)],
)
def test_zero_points_alone_keep_auto_from_nothing(config, dtype, tmp_path):
    """Scales of the model's dtype: readers that keep codes compute the same, and the card's code is the plain one."""
    model = made(config, dtype)
    saved = save(model, tmp_path)
    assert (saved.layout, saved.reasons, field(tmp_path)) == (COMPRESSED, (), True)
    read_alike(tmp_path, model)
    card = (tmp_path / "README.md").read_text()
    assert ".from_pretrained(" in card
    assert "quantization_config=" not in card


# Classes of transformers that cannot load packed or tied quantized layers: predicted where from_pretrained fails.

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DECODER = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
SEEN = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LOADABLE_MODELS = {
    # Its vision tower is a model of transformers of its own, which initializes its layers.
    "Gemma3ForConditionalGeneration": lambda: transformers.Gemma3Config(
        text_config={**SEEN, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 32},
        vision_config={**SEEN, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(**T5),
    "FalconForCausalLM": lambda: transformers.FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2
    ),
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**DECODER, tie_word_embeddings=True),
    "BertForMaskedLM": lambda: transformers.BertConfig(**DECODER),
}
#: (class, scheme, whether the head is quantized too): from_pretrained fails.
FAILS = {
    ("T5ForConditionalGeneration", "int8_rowwise_cast", True), ("T5ForConditionalGeneration", "int8_rowwise_cast", False),
    ("T5ForConditionalGeneration", "fp8_rowwise_cast", True),
    ("FalconForCausalLM", "int8_rowwise_cast", True), ("FalconForCausalLM", "int8_rowwise_cast", False),
    ("Gemma3ForConditionalGeneration", "int8_rowwise_cast", True),
    ("Gemma3ForConditionalGeneration", "int8_rowwise_cast", False),
}  # fmt: skip


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("scheme", ["int8_rowwise_cast", "fp8_rowwise_cast"])
@pytest.mark.parametrize("name", LOADABLE_MODELS)
def test_what_is_predicted_happens(tmp_path, monkeypatch, name, scheme, head):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(LOADABLE_MODELS[name]()).to(torch.bfloat16).eval()
    accepts = lambda m, path: isinstance(m, nn.Linear) and (head or "head" not in path)  # noqa: E731
    quantize_(model, SchemeConfig(scheme=scheme), accepts)
    fails = (name, scheme, head) in FAILS
    saved = save_pretrained(model, tmp_path / "auto")
    assert saved.layout == ("ao_lab" if fails else "compressed-tensors")
    assert any("from_pretrained fails in transformers" in reason for reason in saved.reasons) == fails
    monkeypatch.setattr("ao_lab.checkpoint.api.unsupported_reasons", lambda *arguments: [])
    save_pretrained(model, tmp_path / "plain", layout="compressed-tensors")
    if fails:
        # Dequantized while it loads, as encoder-decoders are, it might load: the prediction does not count on that.
        without_dequantizing(tmp_path / "plain" / "config.json")
        with pytest.raises((AttributeError, RuntimeError)):
            kind.from_pretrained(tmp_path / "plain")
    else:
        kind.from_pretrained(tmp_path / "plain")


def without_dequantizing(path):
    config = json.loads(path.read_text())
    config["quantization_config"].pop("dequantize", None)
    path.write_text(json.dumps(config))


def test_the_encoder_is_read_before_the_model_as_a_whole_is_called(tmp_path):
    """As `generate` of an encoder-decoder does; weights alone are dequantized while they are read, else a card says it."""
    transformers.utils.logging.disable_progress_bar()
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {
        "d_model": 64,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 8,
        "vocab_size": 96,
    }
    ids = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4}
    config = transformers.WhisperConfig(**sizes, **widths, **ids, max_source_positions=10)
    x = torch.randn(1, 8, 20, generator=torch.Generator().manual_seed(0))
    for scheme, inputs in (("int4_g32", None), ("int8_rowwise", "int8_rowwise")):
        model = transformers.WhisperForConditionalGeneration(config).eval()
        layer = SchemeConfig(scheme=scheme, activation_scheme=inputs).for_layout("compressed-tensors")
        quantize_(model, layer)
        saved = save_pretrained(model, tmp_path / scheme, layout="compressed-tensors")
        told = "Call the model once before `generate()`" in (tmp_path / scheme / "README.md").read_text()
        assert told == any("call model(...) once" in one for one in saved.limits) == (inputs is not None)
        theirs = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / scheme)
        if inputs is not None:
            theirs(x, decoder_input_ids=torch.tensor([[4]]))
        wanted, found = (one.get_encoder()(x).last_hidden_state for one in (by_torch(model), theirs))
        assert torch.equal(wanted, found)


def test_other_models_are_not_asked():
    assert unsupported_reasons(nn.Sequential(nn.Linear(2, 2)), ["0"], ["0"], False) == []


# vLLM's loader rules as a table: what it serves of the configurations that we write, and what it refuses.


W4, W8, FP4, MX4, MX8 = "WNA16", "WNA16", "W4A16Fp4", "W4A4Mxfp4", "W8A8Mxfp8"
#: Of each configuration that compressed-tensors can say, with the arguments of test_every_config: vLLM's scheme, None: refused.
SERVED = {
    "Float8DynamicActivationFloat8WeightConfig": ["W8A8Fp8", "W8A8Fp8", "W8A8Fp8"],
    "Float8StaticActivationFloat8WeightConfig": ["W8A8Fp8", "W8A8Fp8"],
    "Float8WeightOnlyConfig": ["W8A16Fp8"],
    "Int4WeightOnlyConfig": [W4, W4],
    "Int8DynamicActivationInt8WeightConfig": ["W8A8Int8", "W8A8Int8"],
    "Int8DynamicActivationIntxWeightConfig": [None],
    "Int8StaticActivationInt8WeightConfig": ["W8A8Int8", "W8A8Int8"],
    "Int8WeightOnlyConfig": [W8],
    "IntxWeightOnlyConfig": [None, None, W4, None, None, None, W8, None, None],
    "LowBitWeightOnlyConfig": [None],
    "MXDynamicActivationMXWeightConfig": [MX8, MX4],
    "MXWeightOnlyConfig": [MX8, MX4],
    "NVFP4WeightOnlyConfig": [FP4],
}


def written(name):
    """The configurations of a class's examples that compressed-tensors can say, as they are written."""
    made = []
    for given in ARGUMENTS[name]:
        try:
            config = getattr(ao_lab, name)(**given).for_layout("compressed-tensors")
        except ValueError:
            continue
        recipe, static = config.recipe(), "Static" in name
        made.append(quantization_config({"a.b": (export_of(recipe).name, recipe, static)}, ["lm_head"]))
    return made


def served(config):
    (group,) = config["config_groups"].values()
    found = None if refused_by_vllm(config) else vllm_rule(group, config["format"])
    return found and found.scheme.removeprefix("CompressedTensors")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_configuration_that_is_written(name):
    configs = written(name)
    assert [served(config) for config in configs] == SERVED.get(name, [])
    for config in configs:
        assert [bool(line) for line in refused_by_vllm(config)] == ([] if served(config) else [True])
        # The client's own schema takes what was written and says it the same way.
        client = QuantizationConfig.model_validate(config)
        assert client.format == config["format"]
        assert client.config_groups["group_0"].weights.strategy is not None


def test_refusals_are_told():
    (config,) = written("LowBitWeightOnlyConfig")
    assert refused_by_vllm(config) == [
        "group_0: vLLM has no scheme for weights of 3-bit int, channel in pack-quantized"
    ]
    (config,) = written("Int8DynamicActivationIntxWeightConfig")
    assert "beside inputs of 8-bit int, token in pack-quantized" in refused_by_vllm(config)[0]


def test_presets_of_the_client_are_served():
    """llm-compressor's own names, in the formats that compressed-tensors infers for them."""
    formats = {
        "W4A16": ("pack-quantized", "WNA16"), "W8A16": ("pack-quantized", "WNA16"), "W8A8": ("int-quantized", "W8A8Int8"),
        "FP8": ("float-quantized", "W8A8Fp8"), "FP8_DYNAMIC": ("float-quantized", "W8A8Fp8"),
        "FP8_BLOCK": ("float-quantized", "W8A8Fp8"), "NVFP4A16": ("nvfp4-pack-quantized", "W4A16Fp4"),
        "MXFP4": ("mxfp4-pack-quantized", "W4A4Mxfp4"), "W4A8": ("int-quantized", "W4A8Fp8"),
    }  # fmt: skip
    for preset, (fmt, wanted) in formats.items():
        group = {
            part: None if args is None else args.model_dump(mode="json")
            for part, args in PRESET_SCHEMES[preset].items()
        }
        found = vllm_rule(group, fmt)
        assert found is not None
        assert found.scheme == f"CompressedTensors{wanted}", preset


def test_one_table():
    assert len(RULES) == 12
    assert vllm_rule({"weights": None, "input_activations": None}, "int-quantized") is None


@pytest.mark.parametrize("several", [False, True])
def test_a_quantized_head_is_named(several):
    """vLLM's head (ParallelLMHead) is no `Linear` to it: a group has it by name, wherever a model for text lies."""
    head = ("pack-quantized", Recipe(weight=named("int8_rowwise")), False)
    other = ("pack-quantized", Recipe(weight=named("int4_g32")), False) if several else head
    made = quantization_config({"model.a": other, "lm_head": head}, [], ["lm_head"])
    named_in = [
        group
        for group in made["config_groups"].values()
        if any(t.startswith("re:") and re.match(t[3:], "language_model.lm_head") for t in group["targets"])
    ]
    assert [group["weights"]["num_bits"] for group in named_in] == [8]
    # Readers give a layer to the first target that matches, and warn of those that got none.
    for group in made["config_groups"].values():
        heads = [t for t in group["targets"] if t == "lm_head" or t.startswith("re:")]
        assert group["targets"][: len(heads)] == heads in ([], ["re:.*lm_head$"])
    without = quantization_config({"model.a": other}, ["lm_head"], ["lm_head"])
    assert not any("re:" in t for group in without["config_groups"].values() for t in group["targets"])


def test_a_reason_is_said_once():
    """Layers whose shapes differ have one reason between them."""
    given = [f"layer.{n}.weight: shape ({n}, 8): 8 elements are not divisible" for n in (2, 3, 4)]
    assert grouped(given) == [f"{given[0]} (and 2 more weights)"]
    assert grouped([*given[:2], "scales: rounded"]) == [f"{given[0]} (and 1 more weight)", "scales: rounded"]
