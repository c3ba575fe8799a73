"""Folders for mlx-lm: words, scales and biases by hand, and as mlx itself reads them where it is installed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ao_lab
from ao_lab import SchemeConfig, save_mlx
from reference import SCHEMES

transformers = pytest.importorskip("transformers")
#: Schemes, and mode, bits and group of each.
HELD = {
    "int4_g32": ("affine", 4, 32), "int4_g64_asymmetric": ("affine", 4, 64), "int8_rowwise": ("affine", 8, 128),
    "int2_g32_asymmetric": ("affine", 2, 32), "int3_g32": ("affine", 4, 32), "mxfp4": ("mxfp4", 4, 32),
    "mxfp8_e4m3": ("mxfp8", 8, 32),
}  # fmt: skip
MXFP4 = SCHEMES["mxfp4"]
REFUSED = {
    "nvfp4": (SchemeConfig(scheme="nvfp4"), "q_proj.weight: nvfp4 is no integer times a scale; mlx holds"),
    "inputs": (
        SchemeConfig(scheme="int8_rowwise", activation_scheme="int8_rowwise"),
        "quantizes or rotates inputs",
    ),
    "blocks": (SchemeConfig(scheme="int4_g16"), "blocks of mlx are 32, 64, 128 elements"),
    "MX blocks": (
        SchemeConfig(scheme=replace(MXFP4, name="mxfp4_g64", scale=replace(MXFP4.scale, block=64))),
        "mxfp4_g64 is no integer",
    ),
    "e5m2": (SchemeConfig(scheme="mxfp8_e5m2"), "mxfp8_e5m2 is no integer"),
    "in training": (
        ao_lab.QATConfig(SchemeConfig(scheme="int4_g32"), step="prepare"),
        "prepared for quantization-aware training; step='convert'",
    ),
    "dense": (None, r"no quantized weights; call quantize_ first \(mlx_lm.convert writes one"),
}


def model_of(config, tied=False):
    fields = {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval().requires_grad_(False)
    if config is not None:
        ao_lab.quantize_(model, SchemeConfig(scheme=config) if isinstance(config, str) else config)
    return model


def up_proj(model):
    return model.model.layers[0].mlp.up_proj.weight


def close(values, weight):
    """Equal for MX; integers within two roundings of the largest product and bias."""
    wanted = weight.dequantize(torch.float32)
    exact = weight.scheme.scale.storage == "float8_e8m0fnu"
    return np.abs(values - wanted.numpy()).max() <= (0 if exact else 2**-22 * 2 * wanted.abs().max())


@pytest.mark.parametrize("name", [name for name in HELD if name.startswith("int")])
def test_words_by_hand(name, tmp_path):
    """The first code in the lowest bits of a word."""
    model = model_of(name)
    _, bits, group = HELD[name]
    written = save_mlx(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization"] == {
        "group_size": group, "bits": bits, "mode": "affine"
    }  # fmt: skip
    assert written.layers == {f"affine {bits} bits g{group}": 8}
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {
        key: tensors[f"model.layers.0.mlp.up_proj.{key}"].numpy() for key in ("weight", "scales", "biases")
    }
    words = parts["weight"].view(np.uint32)
    codes = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    codes = codes.reshape(256, -1, group).astype(np.float32)
    values = codes * parts["scales"][..., None] + parts["biases"][..., None]
    assert close(values.reshape(256, 128), up_proj(model))


@pytest.mark.parametrize("name", HELD)
def test_mlx_has_the_values(name, tmp_path):
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils")
    model = model_of(name)
    loaded, _ = utils.load_model(save_mlx(model, tmp_path).path)
    layer = loaded.model.layers[0].mlp.up_proj
    assert (layer.mode, layer.bits, layer.group_size) == HELD[name]
    biases = getattr(layer, "biases", None)
    values = mx.dequantize(layer.weight, layer.scales, biases, layer.group_size, layer.bits, layer.mode)
    assert close(np.array(values.astype(mx.float32)), up_proj(model))
    ids = torch.arange(24)[None]
    logits = np.array(loaded(mx.array(ids.numpy())))
    with torch.no_grad():
        wanted = model(ids).logits.numpy()
    assert np.abs(logits - wanted).max() < 2**-14 * np.abs(wanted).max()


def test_a_tied_head_is_left_out(tmp_path):
    save_mlx(model_of("mxfp4", tied=True), tmp_path)
    assert not any(name.startswith("lm_head") for name in load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_mlx_has_not_is_refused_and_nothing_is_written(case, tmp_path):
    config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        save_mlx(model_of(config), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
