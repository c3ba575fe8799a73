"""compressed-tensors' folders of any author: every weight is, bit for bit, what the library's own decompressor makes."""

import pytest
import torch

from ao_lab import QuantizedTensor, explain, load_pretrained, save_pretrained
from tests.ao_lab.checkpoint.formats.folders import compressed_folders as made
from tests.ao_lab.checkpoint.formats.folders.compressed_folders import FP8, INT4, INT8, MX, NVFP4, group

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
