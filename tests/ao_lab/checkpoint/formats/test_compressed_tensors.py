"""compressed-tensors' folders of any author: every weight is, bit for bit, what the library's own decompressor makes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ao_lab
from ao_lab import QuantizedTensor, explain, load_pretrained, save_pretrained
from reference.formats.formats import FORMATS
from tests.ao_lab.checkpoint.formats.folders import compressed_folders as made
from tests.ao_lab.checkpoint.formats.folders.compressed_folders import FP8, INT4, INT8, MX, NVFP4, group
from tests.ao_lab.checkpoint.formats.folders.published_layouts import (
    awq_layer,
    bitsandbytes_weight,
    gptq_layer,
)
from tests.support.models.hf_models import save_llama
from tests.support.models.torch_products import by_torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CHANNEL, TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
TOKEN = {"strategy": "token", "dynamic": True}
#: Format, weights, inputs.
CASES = {
    "int8 channel": ("int-quantized", {**INT8, **CHANNEL}, {**INT8, **TOKEN}),
    "int8 channel asymmetric": ("int-quantized", {**INT8, **CHANNEL, "symmetric": False}, {**INT8, **TOKEN}),
    "int8 tensor": ("int-quantized", {**INT8, **TENSOR}, {**INT8, **TOKEN}),
    "int8 tensor asymmetric": ("int-quantized", {**INT8, **TENSOR, "symmetric": False}, {**INT8, **TOKEN}),
    "int8 static inputs": ("int-quantized", {**INT8, **CHANNEL}, {**INT8, **TENSOR}),
    "int8 block": ("int-quantized", {**INT8, "strategy": "block", "block_structure": [32, 64]}, {**INT8, **TOKEN}),
    "int4 a byte each": ("int-quantized", {**INT4, "strategy": "group", "group_size": 32}, {**INT8, **TOKEN}),
    "fp8 channel": ("float-quantized", {**FP8, **CHANNEL}, {**FP8, **TOKEN}),
    "fp8 tensor": ("float-quantized", {**FP8, **TENSOR}, {**FP8, **TENSOR}),
    "fp8 block": (
        "float-quantized", {**FP8, "strategy": "block", "block_structure": [128, 128]},
        {**FP8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "fp8 group": ("float-quantized", {**FP8, "strategy": "group", "group_size": 64}, {**FP8, **TOKEN}),
    "fp8 weights alone": ("naive-quantized", {**FP8, **CHANNEL}, None),
    "int4 group": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}, None),
    "int4 group asymmetric": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 64, "symmetric": False}, None),
    "int4 channel": ("pack-quantized", {**INT4, **CHANNEL}, None),
    "int4 channel asymmetric": ("pack-quantized", {**INT4, **CHANNEL, "symmetric": False}, None),
    "int4 tensor": ("pack-quantized", {**INT4, **TENSOR}, None),
    "int4 tensor asymmetric": ("pack-quantized", {**INT4, **TENSOR, "symmetric": False}, None),
    "int4 actorder": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32, "actorder": "weight"}, None),
    "int4 block": ("pack-quantized", {**INT4, "strategy": "block", "block_structure": [64, 32]}, None),
    "int4 int8 inputs": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}, {**INT8, **TOKEN}),
    **{
        f"int{bits}{' asymmetric' if not even else ''}": (
            "pack-quantized",
            {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 64, "symmetric": even}, None,
        )
        for bits in (2, 3, 5, 6, 7, 8)
        for even in (True, False)
    },
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, **MX}, {"num_bits": 8, **MX, "dynamic": True}),
    "mxfp6": ("mxfp6-pack-quantized", {"num_bits": 6, **MX}, {"num_bits": 6, **MX, "dynamic": True}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, **MX}, None),
    "nvfp4 weights alone": ("nvfp4-pack-quantized", NVFP4, None),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}),
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def folder(tmp_path, name, dtype=torch.bfloat16, **more):
    """(folder, wanted weights) of a case."""
    fmt, weights, inputs = CASES[name]
    model = made.apply(made.tiny_llama(dtype), {"group_0": {**group(weights, inputs), "format": fmt}})
    return tmp_path / "model", made.compress(model, tmp_path / "model", **more)


def check(model, wanted, dtype):
    """Every weight has the library's bits, everything else the model's own."""
    state = model.state_dict()
    assert wanted
    assert {name for name, value in state.items() if isinstance(value, QuantizedTensor)} == set(wanted)
    for name, dense in wanted.items():
        assert made.same_bits(state[name].dequantize(dense.dtype), dense), name
        if dtype == dense.dtype:
            assert state[name].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_librarys(tmp_path, name, dtype):
    path, wanted = folder(tmp_path, name, DTYPES[dtype])
    check(load_pretrained(path), wanted, DTYPES[dtype])


@pytest.mark.parametrize("name", CASES)
def test_models_run_and_are_saved_again(tmp_path, name):
    path, wanted = folder(tmp_path, name)
    model = load_pretrained(path)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(12).reshape(2, 6)).logits).all()
    layers = explain(model)
    assert {layer.name for layer in layers.changed} == set(wanted)
    assert all(f"compressed-tensors ({CASES[name][0]})" in layer.reason for layer in layers.changed)
    for layout in ("auto", "ao_lab"):
        save_pretrained(model, tmp_path / layout, layout=layout)
        check(load_pretrained(tmp_path / layout), wanted, torch.bfloat16)


# A whole Llama in the formats of other libraries: `load_pretrained` gives the model that has the libraries' dense weights.


GROUP = 32
TOKENS = torch.tensor([[1, 5, 9, 2]])
CONFIGS = {
    "gptq": {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": False, "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head"]},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float16"},
}  # fmt: skip


def integers(weight, rng):
    """Codes, zero points and scales of a layer, and the float16 weight that AutoGPTQ and AutoAWQ make of them."""
    outputs, inputs = weight.shape
    codes = rng.integers(0, 16, (outputs, inputs))
    zeros = rng.integers(1, 16, (outputs, inputs // GROUP))
    scales = torch.from_numpy(rng.random(zeros.shape) * 0.02 + 0.001).half()
    spread = np.repeat(zeros, GROUP, axis=1)
    return (
        codes,
        zeros,
        scales,
        scales.repeat_interleave(GROUP, 1) * torch.from_numpy((codes - spread).astype(np.int8)),
    )


def packed(method, name, weight, rng):
    """The tensors that stand for a layer's weight in a format, and that weight."""
    if method == "bitsandbytes":
        codes, table = rng.integers(0, 16, tuple(weight.shape)), torch.tensor(FORMATS["nf4"].values)
        absmax = torch.from_numpy(rng.random(codes.size // 64, np.float32) * 0.1)
        tensors = bitsandbytes_weight(codes, absmax, table, dtype="float16")
        dense = (table[torch.from_numpy(codes)].reshape(-1, 64) * absmax[:, None]).reshape(codes.shape).half()
        return {name + end: part for end, part in tensors.items()}, dense
    codes, zeros, scales, dense = integers(weight, rng)
    path = name.removesuffix("weight")
    layer = (
        awq_layer(codes, zeros, scales) if method == "awq" else gptq_layer(codes, zeros, scales, 4, version=1)
    )
    return {path + end: part for end, part in layer.items()}, dense


def packed_folder(path, method):
    """A Llama in float16 whose linear layers but the last are packed; its dense state."""
    save_llama(path)
    rng, tensors, dense = np.random.default_rng(1), {}, {}
    for name, value in load_file(path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made, dense[name] = packed(method, name, value, rng)
            tensors |= made
        else:
            tensors[name] = dense[name] = value.half()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    quantization = {"quant_method": method, **CONFIGS[method]}
    (path / "config.json").write_text(
        json.dumps({**fields, "dtype": "float16", "quantization_config": quantization})
    )
    return dense


def dense_model(path, state):
    """The model of the folder's configuration with a dense state."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    model.load_state_dict(state)
    return model


def parts_of(model):
    """Every tensor inside a model's state, as bytes."""
    made = {}
    for name, value in model.state_dict().items():
        parts = value.parts if isinstance(value, QuantizedTensor) else {"": value}
        made |= {
            f"{name} {part}": t.contiguous().view(-1).view(torch.uint8)
            for part, t in parts.items()
            if t is not None
        }
    return made


@pytest.mark.parametrize("method", CONFIGS)
def test_outputs_are_those_of_the_dense_weights(method, tmp_path):
    path = tmp_path / "model"
    state = packed_folder(path, method)
    model, dense = ao_lab.load_pretrained(path), dense_model(path, state)
    weights = {name: w for name, w in model.state_dict().items() if isinstance(w, QuantizedTensor)}
    assert set(weights) == {name for name in state if name.endswith("_proj.weight")}
    assert all(torch.equal(w.dequantize(), state[name]) for name, w in weights.items())
    with torch.no_grad():
        assert torch.equal(by_torch(model)(TOKENS).logits, dense(TOKENS).logits)


@pytest.mark.parametrize("method", CONFIGS)
def test_our_own_layout_keeps_every_bit(method, tmp_path):
    packed_folder(tmp_path / "model", method)
    model = ao_lab.load_pretrained(tmp_path / "model")
    ao_lab.save_pretrained(model, tmp_path / "own", layout="ao_lab")
    again, before = parts_of(ao_lab.load_pretrained(tmp_path / "own")), parts_of(model)
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.parametrize("method", CONFIGS)
def test_quantize_pretrained_keeps_them(method, tmp_path):
    """What a library packed stays; the last layer, which it left dense, is quantized."""
    state = packed_folder(tmp_path / "model", method)
    model = ao_lab.quantize_pretrained(tmp_path / "model", ao_lab.Int8WeightOnlyConfig())
    for name, wanted in state.items():
        weight = model.get_parameter(name)
        if name.endswith("_proj.weight"):
            assert torch.equal(weight.dequantize(), wanted)
    assert model.lm_head.weight.scheme.name == "int8_rowwise"
    assert torch.equal(
        model.lm_head.weight.dequantize(),
        ao_lab.quantized(state["lm_head.weight"], "int8_rowwise").dequantize(),
    )


def test_other_dtypes_round_once(tmp_path):
    """In bfloat16 a weight is the exact product, rounded once; float16 before it, as GPTQModel casts, would round twice."""
    state = packed_folder(tmp_path / "model", "gptq")
    model = ao_lab.load_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = model.get_parameter(name)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.dequantize(), weight.dequantize(torch.float32).bfloat16())
    assert torch.equal(weight.dequantize(torch.float16), state[name])
    with torch.no_grad():
        assert model(TOKENS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("zeros", [True, False])
def test_biases_that_layers_do_not_have(zeros, tmp_path):
    """AutoGPTQ wrote a bias of zeros for every layer that it packed; any other number in it is an error."""
    state, path = packed_folder(tmp_path / "model", "gptq"), tmp_path / "model"
    name = "model.layers.0.self_attn.q_proj"
    bias = torch.full((128,), 0.0 if zeros else 0.5, dtype=torch.float16)
    tensors = load_file(path / "model.safetensors") | {f"{name}.bias": bias}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if not zeros:
        with pytest.raises(ValueError, match=r"q_proj.bias.*which the model lacks"):
            ao_lab.load_pretrained(path)
        return
    with pytest.warns(UserWarning, match=r"q_proj.bias, for instance\): zeros in place of a bias"):
        model = ao_lab.load_pretrained(path)
    assert torch.equal(model.get_submodule(name).weight.dequantize(), state[f"{name}.weight"])
    assert model.get_submodule(name).bias is None
