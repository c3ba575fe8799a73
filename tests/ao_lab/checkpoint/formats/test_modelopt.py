"""Folders of NVIDIA's Model Optimizer: every weight is, bit for bit, what its own classes dequantize."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fast
from ao_lab import QuantizedTensor, explain, load_pretrained, save_pretrained
from reference import SCHEMES, Scales
from tests.ao_lab.checkpoint.formats.folders import compressed_folders as made
from tests.ao_lab.checkpoint.formats.folders.modelopt_folders import ALGORITHMS, export

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
DATA = Path(__file__).parent / "data" / "modelopt"
ONE = ("q_proj", "k_proj", "v_proj", "o_proj")


def all_but_head(algorithm):
    return lambda name: None if name == "lm_head" else algorithm


def check(model, wanted):
    state = model.state_dict()
    assert {name for name, value in state.items() if isinstance(value, QuantizedTensor)} == set(wanted)
    for name, dense in wanted.items():
        assert state[name].dtype == dense.dtype
        assert made.same_bits(state[name].dequantize(), dense), name


@pytest.mark.parametrize("style", ["config", "file"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_are_the_librarys(tmp_path, algorithm, dtype, style):
    wanted = export(made.tiny_llama(dtype), tmp_path, all_but_head(algorithm), style=style)
    check(load_pretrained(tmp_path), wanted)


@pytest.mark.parametrize("style", ["config", "file"])
def test_groups_of_another_size(tmp_path, style):
    wanted = export(made.tiny_llama(), tmp_path, all_but_head("W4A16_NVFP4"), style=style, group=32)
    check(load_pretrained(tmp_path), wanted)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_what_the_library_itself_exported(kind):
    """Folders that nvidia-modelopt 0.47 exported, and what its own tensor classes dequantize
    (`tests.ao_lab.checkpoint.formats.folders.modelopt_folders`)."""
    wanted = load_file(DATA / kind / "expected" / "dense.safetensors")
    check(load_pretrained(DATA / kind), wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_models_run_and_are_saved_again(tmp_path, algorithm):
    wanted = export(made.tiny_llama(), tmp_path / "first", all_but_head(algorithm))
    model = load_pretrained(tmp_path / "first")
    with torch.no_grad():
        logits = model(torch.arange(12).reshape(2, 6)).logits
    assert torch.isfinite(logits).all()
    assert all("modelopt (" in layer.reason for layer in explain(model).changed)
    save_pretrained(model, tmp_path / "again")
    again = load_pretrained(tmp_path / "again")
    check(again, wanted)
    with torch.no_grad():
        assert made.same_bits(again(torch.arange(12).reshape(2, 6)).logits, logits)


def test_each_layer_has_its_own_algorithm(tmp_path):
    choose = lambda name: None if name == "lm_head" else "FP8" if name.endswith(ONE) else "NVFP4"  # noqa: E731
    wanted = export(made.tiny_llama(), tmp_path, choose)
    model = load_pretrained(tmp_path)
    check(model, wanted)
    schemes = {layer.name: layer.scheme for layer in explain(model).changed}
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == "modelopt.fp8_tensorwise x fp8_tensorwise"
    assert schemes["model.layers.0.mlp.up_proj.weight"] == "modelopt.nvfp4_g16 x nvfp4"


def test_inputs_have_the_folders_static_scale(tmp_path):
    export(made.tiny_llama(), tmp_path, all_but_head("NVFP4"))
    layer = load_pretrained(tmp_path).model.layers[0].self_attn.q_proj
    x = torch.randn(5, 128).to(torch.bfloat16)
    seen = fast.fake_quantize(x, SCHEMES["nvfp4"], scales=Scales(None, ALGORITHMS["NVFP4"][1]["input_scale"]))
    with torch.no_grad():
        assert made.same_bits(layer(x), torch.nn.functional.linear(seen, layer.weight.dequantize()))


def test_scales_of_the_cache_are_left_out_and_said(tmp_path):
    wanted = export(made.tiny_llama(), tmp_path, all_but_head("FP8"), cache=True)
    with pytest.warns(UserWarning, match=r"2 tensors .* were left out .*k_scale.*key-value cache"):
        model = load_pretrained(tmp_path)
    check(model, wanted)


def drop(end):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(end)] and None


def put(name, value):
    return lambda tensors: tensors.update({f"model.layers.0.mlp.up_proj.{name}": value})


@pytest.mark.parametrize(
    ("algorithm", "change", "message"),
    [
        ("NVFP4", drop("up_proj.weight_scale_2"), "weight_scale_2 is float32"),
        ("NVFP4", drop("up_proj.input_scale"), "input_scale is float32"),
        ("NVFP4", drop("up_proj.weight"), "weight is a matrix"),
        ("NVFP4", drop(".weight_scale"), "has no weight_scale"),
        ("NVFP4", put("pre_quant_scale", torch.ones(128)), "changes the layer's inputs"),
        ("NVFP4", put("weight_scale", torch.ones(256, 8)), "weight_scale is float8_e4m3fn"),
        ("NVFP4", put("weight_scale", torch.ones(256, 4).to(torch.float8_e4m3fn)), r"weight_scale is .*\(256, 8\)"),
        ("FP8", put("weight_scale_2", torch.tensor(1.0)), "is no tensor of modelopt"),
        ("FP8", put("weight", torch.zeros(256, 64, dtype=torch.uint8)), "weight is float8_e4m3fn"),
        ("FP8", put("weight_scale", torch.ones(256)), "weight_scale is float32"),
        ("W4A16_NVFP4", put("input_scale", torch.tensor(1.0)), "is no tensor of modelopt"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_one_error(tmp_path, algorithm, change, message):
    export(made.tiny_llama(), tmp_path, all_but_head(algorithm))
    made.edit_tensors(tmp_path, change)
    model = made.tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo is one of"),
        ({"quant_algo": None}, "quant_algo is one of"),
        ({"quant_algo": ["FP8"]}, "quant_algo is one of"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers of MIXED_PRECISION does not describe it"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}, "does not describe it"),
        ({"group_size": 0}, "group_size is a positive count"),
        ({"group_size": "16"}, "group_size is a positive count"),
        ({"group_size": 32}, r"weight_scale is .*\(\d+, \d\)"),
        ({"config_groups": {"group_0": {"weights": {"group_size": 32}}}}, r"weight_scale is .*\(\d+, \d\)"),
        ({"config_groups": {"group_0": {"weights": {"group_size": [16]}}}}, "group_size is a positive count"),
        ({"quantization": 3}, "quantization is an object"),
        ({"quant_method": "modelopt_unknown"}, "is not supported, these are"),
        ({"quant_method": 3}, "is not supported, these are"),
    ],
)  # fmt: skip
def test_damaged_descriptions_are_one_error(tmp_path, change, message):
    export(made.tiny_llama(), tmp_path, all_but_head("NVFP4"))
    made.edit_config(tmp_path, lambda given: {**given, **change})
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)
