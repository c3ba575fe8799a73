"""Saved models: what transformers reads of them, what we read back, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from torch import nn

import ao_lab
import fast
import reference
from ao_lab import (
    FqnToConfig,
    Int8StaticActivationInt8WeightConfig,
    QuantizedTensor,
    Recipe,
    SchemeConfig,
    explain,
    load_pretrained,
    quantize_,
    quantized,
    save_pretrained,
)
from ao_lab.checkpoint.export import export_of, quantization_config, value_read
from ao_lab.checkpoint.io.shards import INDEX, look_at
from ao_lab.checkpoint.plain_readers import reading
from ao_lab.config.recipe import named
from ao_lab.tensor.quantized_tensor import from_quantized
from experiments.models.llama import LanguageModel, ModelSettings
from reference import SCHEMES, Format, Quantized, register
from tests.support.runs import forks

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "bfloat16",
    "rope_theta": 10000.0,
}  # fmt: skip
#: Scheme of the weight, scheme of the input, format.
FORMATS = [
    ("int8_rowwise_cast", "compressed_tensors.int8_token", "int-quantized"),
    ("int8_rowwise_asymmetric", "compressed_tensors.int8_token", "int-quantized"),
    ("int8_rowwise", None, "pack-quantized"),
    ("int8_g64_asymmetric", None, "pack-quantized"),
    ("int4_g128", None, "pack-quantized"),
    ("int4_g32_asymmetric", None, "pack-quantized"),
    ("int8_rowwise_bf16", None, "pack-quantized"),
    ("int4_g64_bf16", None, "pack-quantized"),
    ("int3_g32_cast", "compressed_tensors.int8_token", "pack-quantized"),
    ("fp8_rowwise", "compressed_tensors.fp8_token", "float-quantized"),
    ("fp8_tensorwise", None, "float-quantized"),
    ("fp8_128x128_cast", "compressed_tensors.fp8_group_128", "float-quantized"),
    ("mxfp8_e4m3", "compressed_tensors.mxfp8_e4m3", "mxfp8-quantized"),
    ("mxfp6_e2m3", None, "mxfp6-pack-quantized"),
    ("mxfp4_rceil", "compressed_tensors.mxfp4", "mxfp4-pack-quantized"),
    ("nvfp4", None, "nvfp4-pack-quantized"),
    ("compressed_tensors.nvfp4", None, "nvfp4-pack-quantized"),
]
OURS = [
    ("nf4", None), ("mxint8", None), ("fp8_rowwise_e5m2", None), ("nvfp4", "nvfp4"), ("int8_rowwise", "int8_rowwise"),
    ("fp8_rowwise", "fp8_tensorwise"), ("int3_g32_asymmetric", "compressed_tensors.int8_token"),
    ("int4_g128", "fp8_rowwise"),
]  # fmt: skip
TOKENS = torch.arange(20).reshape(2, 10)
# The reciprocal that readers divide by gives the wrong bits for some outer scales: a neighbour helps one, none helps the other.
NEIGHBOUR, NONE = "0x1.1aaaac0000000p+0", "0x1.ad55540000000p+0"


def small_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=1)).to(dtype).eval()


def quantized_model(scheme, activation=None):
    model = small_model()
    config = SchemeConfig(scheme=scheme, activation_scheme=activation)
    quantize_(model, config, lambda m, name: isinstance(m, nn.Linear) and name != "lm_head")
    return model


def same_state(a, b):
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same_weights(theirs, ours):
    for name, parameter in ours.named_parameters():
        value = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter
        assert torch.equal(theirs.get_parameter(name), value), name


def read_by_transformers(folder):
    """The model that transformers makes of a folder, without our code."""
    config = transformers.CompressedTensorsConfig(dequantize=True)
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    )


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("scheme", "activation", "fmt"), FORMATS)
def test_transformers_reads_the_same_weights(tmp_path, scheme, activation, fmt):
    model = quantized_model(scheme, activation)
    saved = save_pretrained(model, tmp_path, config=LLAMA, layout="compressed-tensors")
    assert (saved.layout, saved.reasons) == ("compressed-tensors", ())
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (stored["format"], stored["ignore"]) == (fmt, ["lm_head"])
    theirs = read_by_transformers(tmp_path)
    assert_same_weights(theirs, model)
    again = load_pretrained(tmp_path, small_model())
    assert same_state(again, model)
    assert torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_of_several_formats(tmp_path):
    """Read without dequantize=True, which knows one format only; scales are then cast to the model's dtype, so keep them so."""
    model = small_model()
    schemes = {
        r"re:.*self_attn\..*": "mxfp8_e4m3",
        r"re:.*mlp\.(up|gate)_proj": "int4_g32_bf16",
        r"re:.*down_proj": "nvfp4",
    }
    quantize_(model, FqnToConfig({name: SchemeConfig(scheme=scheme) for name, scheme in schemes.items()}))
    save_pretrained(model, tmp_path, config=LLAMA, layout="compressed-tensors")
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["format"] == "mixed-precision"
    assert len(stored["config_groups"]) == 3
    assert same_state(load_pretrained(tmp_path, small_model()), model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs(TOKENS)
    assert_same_weights(theirs, model)


@pytest.mark.parametrize(("scheme", "activation", "fmt"), FORMATS)
def test_configurations_are_valid_and_wrong_ones_are_not(scheme, activation, fmt):
    from compressed_tensors.quantization import QuantizationConfig

    recipe = Recipe(weight=named(scheme), activation=named(activation))
    made = quantization_config({"a": (fmt, recipe, False)}, ["b"])
    QuantizationConfig.model_validate(made)
    made["config_groups"]["group_0"]["weights"]["group_size"] = -3
    with pytest.raises(ValueError, match="group"):
        QuantizationConfig.model_validate(made)


def test_the_names_that_serving_knows():
    """W4A16, FP8_DYNAMIC, MXFP4 and NVFP4A16 as compressed-tensors' presets have them."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    pairs = {
        "W4A16": ("int4_g128", None),
        "W8A16": ("int8_g128", None),
        "W8A8": ("int8_rowwise", "int8_rowwise"),
        "FP8_DYNAMIC": ("fp8_rowwise", "fp8_rowwise"),
        "MXFP4A16": ("mxfp4", None),
        "MXFP4": ("mxfp4", "mxfp4"),
        "NVFP4A16": ("nvfp4", None),
    }
    for name, (scheme, activation) in pairs.items():
        recipe = Recipe(weight=named(scheme), activation=named(activation))
        group = quantization_config({"a": ("", recipe, False)}, [])["config_groups"]["group_0"]
        for part in ("weights", "input_activations"):
            wanted = PRESET_SCHEMES[name].get(part)
            given = group[part] and QuantizationArgs.model_validate(group[part])
            assert (given is None) == (wanted is None)
            for key in (
                ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype")
                if given
                else ()
            ):
                assert getattr(given, key) == getattr(wanted, key), (name, part, key)


@pytest.mark.parametrize(("scheme", "activation"), OURS)
def test_what_compressed_tensors_cannot_say_is_kept_in_our_layout(tmp_path, scheme, activation):
    model = quantized_model(scheme, activation)
    with pytest.raises(ValueError, match="compressed-tensors"):
        save_pretrained(model, tmp_path, layout="compressed-tensors")
    saved = save_pretrained(model, tmp_path)
    assert saved.layout == "ao_lab"
    assert saved.reasons
    assert same_state(load_pretrained(tmp_path, small_model()), model)


def test_our_layout_holds_everything(tmp_path):
    """Embeddings, static scales, kernels, batched experts: codes, scales and recipes come back."""
    model = small_model()
    model.experts = nn.Parameter(torch.randn(2, 64, 128))
    quantize_(
        model,
        SchemeConfig(scheme="int4_g32", kernel="dequantize", axis=-1),
        lambda m, name: "embed" in name or not name,
    )
    quantize_(model, Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05)))
    save_pretrained(model, tmp_path, layout="ao_lab")
    other = small_model()
    other.experts = nn.Parameter(torch.zeros(2, 64, 128))
    load_pretrained(tmp_path, other)
    assert same_state(other, model)
    assert [layer.scheme for layer in explain(other).layers] == [
        layer.scheme for layer in explain(model).layers
    ]
    assert other.experts.recipe.kernel == "dequantize"
    assert torch.equal(other(TOKENS), model(TOKENS))
    names = set(look_at(tmp_path).specs)
    assert {"experts.codes", "experts.scale", "lm_head.weight.input_scale", "model.norm.weight"} <= names


def test_static_scales_in_both_layouts(tmp_path):
    config = Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05))
    model = small_model()
    quantize_(model, config.for_layout("compressed-tensors"))
    saved = save_pretrained(model, tmp_path, config=LLAMA)
    assert saved.layout == "compressed-tensors"
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    inputs = stored["config_groups"]["group_0"]["input_activations"]
    assert (inputs["dynamic"], inputs["strategy"]) == (False, "tensor")
    assert same_state(load_pretrained(tmp_path, small_model()), model)
    zero = {"act_quant_zero_point": torch.tensor(4), "act_mapping_type": "ASYMMETRIC"}
    model = small_model()
    quantize_(model, replace(config, **zero))
    saved = save_pretrained(model, tmp_path, config=LLAMA)
    assert saved.layout == "ao_lab"
    assert same_state(load_pretrained(tmp_path, small_model()), model)


def test_shards(tmp_path):
    model = quantized_model("mxfp4")
    whole = save_pretrained(model, tmp_path, config=LLAMA)
    assert [file.name for file in whole.files] == ["model.safetensors", "config.json", "README.md"]
    saved = save_pretrained(model, tmp_path, config=LLAMA, max_shard_bytes=200_000)
    assert (tmp_path / INDEX).is_file()
    assert not (tmp_path / "model.safetensors").exists()
    assert len(saved.files) > 3
    assert all(file.stat().st_size < 210_000 for file in saved.files)
    assert same_state(load_pretrained(tmp_path, small_model()), model)
    assert same_state(load_pretrained(tmp_path, small_model()), model)
    save_pretrained(model, tmp_path, config=LLAMA)
    assert {path.name for path in Path(tmp_path).iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }


def test_transformers_models_without_a_model_given(tmp_path):
    config = transformers.AutoConfig.for_model(**{**LLAMA, "tie_word_embeddings": True})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    quantize_(model, SchemeConfig(scheme="mxfp8_e4m3"), lambda m, name: "proj" in name)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert same_state(again, model)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    # A quantized head and a dense table are no longer one.
    quantize_(model, SchemeConfig(scheme="mxfp8_e4m3"), lambda m, name: name == "lm_head")
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert same_state(load_pretrained(tmp_path), model)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "out").touch()
    net = nn.Linear(32, 32)
    quantize_(net, SchemeConfig(scheme="int8_rowwise"))
    with pytest.raises(NotADirectoryError, match="out is a file, and a folder is to be written there"):
        save_pretrained(net, tmp_path / "out", config={})
    with pytest.raises(TypeError, match=r"got str: 'out'; of a folder ao_lab\.load_pretrained"):
        quantize_("out", SchemeConfig(scheme="int8_rowwise"))


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_pretrained(tmp_path, small_model())
    with pytest.raises(ValueError, match="call quantize_ first"):
        save_pretrained(small_model(), tmp_path)
    save_pretrained(quantized_model("mxfp4"), tmp_path)
    with pytest.raises(ValueError, match="describes no model"):
        load_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has \['lm_head\.weight'"):
        load_pretrained(tmp_path, nn.Linear(2, 2))
    narrow = LanguageModel(ModelSettings(layers=1, feed_forward=256))
    with pytest.raises(ValueError, match="has shape"):
        load_pretrained(tmp_path, narrow)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks \[.lm_head"):
        load_pretrained(tmp_path, small_model())


def nvfp4_with_outer(outer):
    """All products of codes and block scales, under one outer scale."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 126)
    scale = torch.arange(1, 127, dtype=torch.uint8).reshape(1, 126)
    q = Quantized(
        fast.pack(codes, "float4_e2m1fn"),
        scale,
        torch.tensor(outer),
        None,
        (1, 2016),
        1,
        SCHEMES["nvfp4"],
        True,
    )
    return from_quantized(q, Recipe(weight=SCHEMES["nvfp4"]), torch.bfloat16)


def test_reciprocals_that_round_wrongly():
    t = nvfp4_with_outer(float.fromhex(NEIGHBOUR))
    export = export_of(t.recipe)
    exact = export.write(t.quantized)
    assert not torch.equal(value_read(export, exact, t.quantized), t.dequantize())
    tensors = reading(t).tensors
    assert torch.equal(value_read(export, tensors, t.quantized), t.dequantize())
    assert not torch.equal(tensors["weight_global_scale"], exact["weight_global_scale"])
    with pytest.raises(ValueError, match="other values"):
        reading(nvfp4_with_outer(float.fromhex(NONE)))


@pytest.mark.parametrize("rows", [1, 3, 4, 8])
def test_zero_points_of_few_rows(rows):
    """One scale a row: the words of zero points are the transposed column."""
    t = quantized(torch.randn(rows, 64), "int8_rowwise_asymmetric")
    read = reading(t)
    assert read.format == "pack-quantized"
    tensors = read.tensors
    assert tensors["weight_zero_point"].shape == (-(-rows // 4), 1)
    assert torch.equal(value_read(export_of(t.recipe), tensors, t.quantized), t.dequantize(torch.bfloat16))


def test_blocks_that_are_nan_stay_with_us():
    dense = torch.randn(4, 64)
    dense[0, 0] = torch.nan
    with pytest.raises(ValueError, match="other values"):
        reading(quantized(dense, "mxfp4"))


@pytest.mark.parametrize(
    "scheme", ["te.nvfp4", "torchao.fp8_rowwise_training", "fp8_1x128", "torchao.int4_g128_tinygemm"]
)
def test_conventions_without_a_format(scheme):
    assert export_of(Recipe(weight=SCHEMES[scheme])) is None
    with pytest.raises(ValueError, match="no format"):
        reading(quantized(torch.randn(4, 128), scheme))


@pytest.mark.parametrize("layout", ["compressed-tensors", "ao_lab"])
def test_pieces_of_one_weight_share_its_scale(tmp_path, layout):
    model = small_model()
    mlp = model.model.layers[0].mlp
    both = quantized(
        torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]), "fp8_tensorwise"
    )
    for layer, piece in zip((mlp.gate_proj, mlp.up_proj), both.chunk(2), strict=True):
        layer.weight = nn.Parameter(piece, requires_grad=False)
    assert mlp.gate_proj.weight.scale.data_ptr() == mlp.up_proj.weight.scale.data_ptr()
    save_pretrained(model, tmp_path, layout=layout)
    assert same_state(load_pretrained(tmp_path, small_model()), model)


def test_what_untying_parts_is_stored_under_each_name(tmp_path):
    """BERT's head is tied by its weight and by its bias; with a quantized head readers tie neither."""
    from safetensors import safe_open
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertForMaskedLM(BertConfig(**sizes)).eval()
    torch.nn.init.normal_(model.cls.predictions.bias)
    config = ao_lab.Int8WeightOnlyConfig().for_layout("compressed-tensors")
    ao_lab.quantize_(model, config, lambda m, name: isinstance(m, torch.nn.Linear))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(ids).logits
    assert ao_lab.save_pretrained(model, tmp_path).layout == "compressed-tensors"
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        found = [file.get_tensor(f"cls.predictions.{name}") for name in ("bias", "decoder.bias")]
    assert torch.equal(found[0], found[1])
    assert found[0].abs().max() > 1
    again = ao_lab.load_pretrained(tmp_path, BertForMaskedLM(BertConfig(**sizes)).eval())
    with torch.no_grad():
        assert torch.equal(again(ids).logits, wanted)


FOREIGN = """
import sys
import torch
import ao_lab, reference

assert "float8_e3m4_tested" not in reference.FORMATS
model = torch.nn.Sequential(torch.nn.Linear(64, 32))
ao_lab.load_pretrained(sys.argv[1], model)
wanted = torch.load(sys.argv[2])
assert torch.equal(model[0].weight.dequantize(), wanted)
scheme = model[0].weight.scheme
assert "float8_e3m4_tested" not in reference.FORMATS
ao_lab.register(ao_lab.Format(name="float8_e3m4_tested", kind="float", bits=8, exponent_bits=3, mantissa_bits=4, bias=4))
ao_lab.load_pretrained(sys.argv[1], model)
assert torch.equal(model[0].weight.dequantize(), wanted)
ao_lab.save_pretrained(model, "again", layout="ao_lab")
print("RESULT", scheme == model[0].weight.scheme, scheme.format.mantissa_bits)
"""


@pytest.mark.parametrize("recorded", [False, True])
def test_a_format_of_ones_own_travels_with_the_model(tmp_path, recorded):
    """Made at run time, registered or given as a record: read where nobody has registered it."""
    made = Format(
        name="float8_e3m4_tested",
        kind="float",
        bits=8,
        exponent_bits=3,
        mantissa_bits=4,
        bias=3,
        specials="ieee",
    )
    known = reference.FORMATS.get(made.name)
    register(made)
    try:
        scheme = replace(SCHEMES["fp8_rowwise"], name="e3m4_rows", element=made if recorded else made.name)
        scheme = replace(scheme, scale=replace(scheme.scale, target=float(made.max)))
        model = nn.Sequential(nn.Linear(64, 32))
        quantize_(model, SchemeConfig(scheme=scheme))
        save_pretrained(model, tmp_path / "model", layout="ao_lab")
        torch.save(model[0].weight.dequantize(), tmp_path / "wanted.pt")
    finally:
        if known is None:
            del reference.FORMATS[made.name]
    (tmp_path / "read.py").write_text(FOREIGN)
    done = forks.python(
        tmp_path / "read.py", tmp_path / "model", tmp_path / "wanted.pt", server="ao_lab", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-3:] == ["RESULT", "True", "4"]
    first, again = (
        safetensors.safe_open(next(path.glob("*.safetensors")), "pt").metadata()
        for path in (tmp_path / "model", tmp_path / "again")
    )
    assert first == again
