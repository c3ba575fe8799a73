"""DeepSeek's FP8 with blocks: the oracles are transformers, where it reads the blocks, and DeepSeek's own formula."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ao_lab
from ao_lab import QuantizedTensor, load_pretrained, save_pretrained
from tests.ao_lab.checkpoint.formats.folders.published_layouts import FP8, deepseek, fp8_parts, gpt_oss, write
from tests.support.models.expert_models import TOKENS, model_of
from tests.support.models.torch_products import by_torch

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
UE8M0 = {**FP8, "scale_fmt": "ue8m0"}
KINDS = {
    "float32": (FP8, torch.float32),
    "bfloat16": (FP8, torch.bfloat16),
    "ue8m0": (UE8M0, torch.float8_e8m0fnu),
}


@pytest.fixture
def theirs(monkeypatch):
    """How transformers loads a folder; it asks for accelerate, which it does not use on a CPU."""
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    return lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def published_value(codes, scale, block=128):
    """weight_dequant of DeepSeek-V3's kernel.py: each tile of 128 x 128 times its scale, in float32."""
    spread = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def linear_of(tmp_path, codes, scale, quantization, dtype="bfloat16", **more):
    """A folder of one linear layer, read."""
    (tmp_path / "config.json").write_text(json.dumps({"dtype": dtype, "quantization_config": quantization}))
    save_file({"weight": codes, "weight_scale_inv": scale, **more}, tmp_path / "model.safetensors")
    layer = torch.nn.Linear(codes.shape[1], codes.shape[0], bias=False, dtype=getattr(torch, dtype))
    return load_pretrained(tmp_path, layer)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_weights_and_outputs_are_those_of_transformers(tmp_path, theirs, kind, name):
    deepseek(tmp_path, *KINDS[kind], name)
    model, expected = load_pretrained(tmp_path), theirs(tmp_path)
    state = model.state_dict()
    assert sum(isinstance(x, QuantizedTensor) and x.dim() == 3 for x in state.values()) == 2
    for key, dense in expected.state_dict().items():
        mine = state[key].dequantize() if isinstance(state[key], QuantizedTensor) else state[key]
        assert torch.equal(mine, dense), key
    with torch.no_grad():
        assert torch.equal(by_torch(model)(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
def test_every_way_of_multiplying(tmp_path, theirs, way):
    deepseek(tmp_path)
    model, expected = load_pretrained(tmp_path), theirs(tmp_path)
    for one in (model, expected):
        one.set_experts_implementation(way)
    with torch.no_grad():
        assert torch.equal(by_torch(model)(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
def test_inputs_of_loaded_experts_can_be_quantized(tmp_path, way):
    """The same codes under a recipe with inputs: every way of multiplying rounds them."""
    deepseek(tmp_path)
    model = load_pretrained(tmp_path)
    model.set_experts_implementation(way)
    rounded = copy.deepcopy(model)
    from ao_lab import SCHEMES

    experts = rounded.get_submodule(EXPERTS.rpartition(".")[0])
    for name in ("gate_up_proj", "down_proj"):
        made = getattr(experts, name).data.with_recipe(activation=SCHEMES["fp8_1x128"])
        setattr(experts, name, torch.nn.Parameter(made, requires_grad=False))
    with torch.no_grad():
        assert not torch.equal(model(TOKENS).logits, rounded(TOKENS).logits)


@pytest.mark.parametrize("shape", [(160, 96), (128, 128), (300, 257), (576, 128)])
def test_short_last_blocks_by_the_published_formula(tmp_path, shape):
    """transformers refuses the kv_a projection of DeepSeek-V3 (576 rows, 5 scales) or divides 160 rows evenly by 2."""
    codes, scale = fp8_parts(torch.randn(shape))
    layer = linear_of(tmp_path, codes, scale, FP8)
    assert torch.equal(layer.weight.dequantize(), published_value(codes, scale).to(torch.bfloat16))
    assert torch.equal(layer.weight.codes, codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_code_with_scales_at_the_edges(tmp_path, dtype):
    """All 256 codes, NaN included, with scales from the smallest subnormal to those whose products overflow."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 256).repeat(7 * 128, 1)
    scale = torch.tensor([2.0**-149, 2.0**-126, 1e-30, 1.0, 3.0, 1e36, 3.4e38]).reshape(7, 1).repeat(1, 2)
    weight = linear_of(tmp_path, codes, scale, FP8, dtype).weight
    kind = getattr(torch, dtype)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, output_dtype=kind)
    mine = weight.dequantize()
    assert torch.equal(mine.isnan(), expected.isnan())
    assert torch.equal(mine.nan_to_num(0.5).view(torch.uint8), expected.nan_to_num(0.5).view(torch.uint8))


@pytest.mark.parametrize("form", [torch.uint8, torch.float8_e8m0fnu])
def test_powers_of_two_as_bytes(tmp_path, form):
    codes, scale = fp8_parts(torch.randn(256, 256), powers=True)
    kept = scale.to(torch.float8_e8m0fnu).view(form)
    layer = linear_of(tmp_path, codes, kept, UE8M0)
    expected = Fp8Dequantize(None)._dequantize_one(codes, kept, output_dtype=torch.bfloat16)
    assert torch.equal(layer.weight.dequantize(), expected)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_a_weight_and_static_inputs(tmp_path, shape):
    codes, scale = torch.randn(64, 96).to(torch.float8_e4m3fn), torch.tensor(0.37).reshape(shape)
    quantization = {**FP8, "weight_block_size": None, "activation_scheme": "static"}
    with pytest.warns(UserWarning, match="scales of inputs, which stay as they are"):
        layer = linear_of(tmp_path, codes, scale, quantization, activation_scale=torch.tensor(0.5))
    assert torch.equal(layer.weight.dequantize(), (codes.float() * 0.37).to(torch.bfloat16))
    assert layer.weight.recipe.activation is None


def test_experts_with_a_scale_each(tmp_path, theirs):
    """One scale for each expert's matrix: blocks as large as the matrix, in one weight."""
    from transformers.core_model_loading import revert_weight_conversion

    model = model_of("qwen3_moe")
    tensors = dict(revert_weight_conversion(model, model.state_dict()))
    for key in [key for key in tensors if ".experts." in key]:
        scale = tensors[key].float().abs().amax() / 448
        tensors[key], tensors[f"{key}_scale_inv"] = (
            (tensors[key].float() / scale).to(torch.float8_e4m3fn),
            scale,
        )
    write(tmp_path, model, tensors, {**FP8, "weight_block_size": None})
    made, expected = load_pretrained(tmp_path), theirs(tmp_path)
    assert made.get_parameter(EXPERTS).scale.shape == (4, 2, 1)
    assert torch.equal(made.get_parameter(EXPERTS).dequantize(), expected.get_parameter(EXPERTS))


def test_layers_that_the_class_ignores_are_left_out(tmp_path):
    """DeepSeek publishes a layer that predicts a second token; the model's class says to ignore it."""
    deepseek(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.61.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"1 tensors of .* were left out .*layers\.61\.eh_proj"):
        load_pretrained(tmp_path)


def test_saved_in_our_layout_and_read_again(tmp_path):
    deepseek(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "own", layout="ao_lab")
    back = load_pretrained(tmp_path / "own").state_dict()
    for name, value in model.state_dict().items():
        if isinstance(value, QuantizedTensor):
            assert back[name].meta == value.meta
            assert torch.equal(back[name].codes, value.codes)
            assert torch.equal(back[name].scale, value.scale)


def lose(part):
    def change(tensors, fields):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def put(name, make):
    return lambda tensors, fields: tensors.update({name: make(tensors[name])})


def say(**more):
    return lambda tensors, fields: fields["quantization_config"].update(more)


SCALE = "model.layers.0.self_attn.o_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose("o_proj.weight_scale_inv"), "o_proj.weight_scale_inv.* nowhere"),
        (
            put(SCALE, lambda x: x.repeat(2, 1)),
            r"o_proj.weight_scale_inv.* got torch.float32 of shape|shape \(2, 1\)",
        ),
        (put(SCALE, lambda x: x.to(torch.int32)), "scales are torch.float32"),
        (put(SCALE, lambda x: torch.full_like(x, 255).to(torch.uint8)), "a scale is 255"),
        (
            put(SCALE.removesuffix("_scale_inv"), lambda x: x.float()),
            "are scales of a weight in torch.float8_e4m3fn",
        ),
        (lose("experts.3.up_proj"), "experts.gate_up_proj|transformers"),
        (lose("experts.3."), "shape"),
        (put("model.layers.0.mlp.experts.1.up_proj.weight", lambda x: x), "quantized"),
        (say(weight_block_size=[128]), "weight_block_size is two counts or null"),
        (say(weight_block_size=[128, "a"]), "weight_block_size"),
        (say(weight_block_size=[64, 64]), "weight_scale_inv"),
    ],
)
def test_damaged_folders_are_one_error(tmp_path, change, message):
    deepseek(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    if message == "quantized":
        name = "model.layers.0.mlp.experts.1.up_proj.weight"
        tensors[name] = tensors[name].to(torch.bfloat16)
        del tensors[f"{name}_scale_inv"]
    change(tensors, fields)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


# gpt-oss in MXFP4: transformers' own dequantization is the oracle, for every byte and scale and for a model.


NAME = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt_oss")
    gpt_oss(path)
    return path


def mxfp4_theirs(folder):
    config = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config
    )


def changed(folder, target, change):
    """The folder with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.filterwarnings("ignore:You passed")
def test_mxfp4_weights_and_outputs_are_those_of_transformers(folder):
    model, expected = load_pretrained(folder), mxfp4_theirs(folder)
    found = {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert found == {NAME, NAME.replace("gate_up", "down")}
    for name, dense in expected.state_dict().items():
        mine = model.state_dict()[name]
        assert torch.equal(mine.dequantize() if name in found else mine, dense), name
    with torch.no_grad():
        assert torch.equal(by_torch(model)(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.filterwarnings("ignore:You passed")
def test_mxfp4_every_way_of_multiplying(folder, way):
    model, expected = load_pretrained(folder), mxfp4_theirs(folder)
    for one in (model, expected):
        one.set_experts_implementation(way)
    with torch.no_grad():
        assert torch.equal(by_torch(model)(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_scale_and_every_pair_of_codes(tmp_path, folder, dtype):
    """255 scales by 256 bytes, products that overflow or underflow included."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).expand(255, 16, 4, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).reshape(255, 1, 1).expand(255, 16, 4).contiguous()
    config = transformers.GptOssConfig(dtype=str(dtype).removeprefix("torch."))
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.empty(255, 128, 16, dtype=dtype))
    weight = load_pretrained(tmp_path, module).w
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(weight.dequantize().contiguous().view(torch.uint8), expected.view(torch.uint8))


def test_mxfp4_saved_in_our_layout_and_read_again(folder, tmp_path):
    model = load_pretrained(folder)
    saved = save_pretrained(model, tmp_path / "own", layout="ao_lab")
    back = load_pretrained(tmp_path / "own").get_parameter(NAME)
    mine = model.get_parameter(NAME)
    assert saved.layout == "ao_lab"
    assert back.meta == mine.meta
    assert torch.equal(back.codes, mine.codes)
    assert torch.equal(back.scale, mine.scale)


def test_the_report_says_what_it_is(folder):
    layers = {layer.name: layer for layer in ao_lab.explain(load_pretrained(folder)).layers}
    assert layers[NAME].scheme == "gpt_oss.mxfp4"
    assert layers[NAME].shape == (4, 128, 256)


def mxfp4_lose(name):
    return lambda tensors: tensors.pop(name)


def mxfp4_put(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mxfp4_lose(f"{NAME}_scales"), r"lacks tensor .*gate_up_proj_scales"),
        (
            mxfp4_put(f"{NAME}_scales", lambda x: x[:, :-1].contiguous()),
            r"gate_up_proj_scales.* got .*shape \(4, 255, 4\)",
        ),
        (
            mxfp4_put(f"{NAME}_blocks", lambda x: x[..., :8].contiguous()),
            "is bytes \\(experts, out, in / 32, 16\\)",
        ),
        (mxfp4_put(f"{NAME}_blocks", lambda x: x.to(torch.int32)), "is bytes"),
        (mxfp4_put(f"{NAME}_scales", lambda x: x.fill_(255)), "a scale is 255"),
        (
            lambda tensors: [tensors.pop(n) for n in list(tensors) if "_blocks" in n],
            "has no tensor \\*_blocks",
        ),
    ],
)
def test_mxfp4_damaged_folders_are_one_error(folder, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(changed(folder, tmp_path / "damaged", change))
