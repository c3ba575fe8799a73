"""gpt-oss in MXFP4: transformers' own dequantization is the oracle, for every byte and scale and for a model."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ao_lab
from ao_lab import QuantizedTensor, load_pretrained, save_pretrained
from tests.ao_lab.checkpoint.formats.folders.published_experts import gpt_oss
from tests.support.models.expert_models import TOKENS

NAME = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt_oss")
    gpt_oss(path)
    return path


def theirs(folder):
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
def test_weights_and_outputs_are_those_of_transformers(folder):
    model, expected = load_pretrained(folder), theirs(folder)
    found = {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert found == {NAME, NAME.replace("gate_up", "down")}
    for name, dense in expected.state_dict().items():
        mine = model.state_dict()[name]
        assert torch.equal(mine.dequantize() if name in found else mine, dense), name
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.filterwarnings("ignore:You passed")
def test_every_way_of_multiplying(folder, way):
    model, expected = load_pretrained(folder), theirs(folder)
    for one in (model, expected):
        one.set_experts_implementation(way)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


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


def test_saved_in_our_layout_and_read_again(folder, tmp_path):
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


def lose(name):
    return lambda tensors: tensors.pop(name)


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose(f"{NAME}_scales"), r"lacks tensor .*gate_up_proj_scales"),
        (
            put(f"{NAME}_scales", lambda x: x[:, :-1].contiguous()),
            r"gate_up_proj_scales.* got .*shape \(4, 255, 4\)",
        ),
        (
            put(f"{NAME}_blocks", lambda x: x[..., :8].contiguous()),
            "is bytes \\(experts, out, in / 32, 16\\)",
        ),
        (put(f"{NAME}_blocks", lambda x: x.to(torch.int32)), "is bytes"),
        (put(f"{NAME}_scales", lambda x: x.fill_(255)), "a scale is 255"),
        (
            lambda tensors: [tensors.pop(n) for n in list(tensors) if "_blocks" in n],
            "has no tensor \\*_blocks",
        ),
    ],
)
def test_damaged_folders_are_one_error(folder, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(changed(folder, tmp_path / "damaged", change))
