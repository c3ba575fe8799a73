"""Sizes from shapes alone: those of the files, and those that were published."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ao_lab import (
    FqnToConfig,
    Int8StaticActivationInt8WeightConfig,
    SchemeConfig,
    model_size,
    quantize_,
    quantized,
    save_pretrained,
    weight_size,
)
from ao_lab.checkpoint.plain_readers import reading, with_own_scales
from ao_lab.checkpoint.size import Size, Written, written_as
from ao_lab.config.recipe import Recipe, named
from reference import SCHEMES
from tests.ao_lab.checkpoint.test_api import FORMATS, LLAMA, OURS

#: Linear layers of Llama-3.1-8B.
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
#: Decimal GB of torchao's table of post-training quantization, H100.
PUBLISHED = {"bfloat16": 15.01, "int8wo": 7.52, "int4wo-64": 4.22, "float8wo": 7.51, "float8dq per-row": 7.51,
             "float8dq per-tensor": 7.51}  # fmt: skip
WEIGHTS, ROWS, GROUPS = 7_504_658_432, 1_504_512, 7_504_658_432 // 64


def little():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(40, 256), nn.Linear(256, 48), nn.LayerNorm(48), nn.Linear(48, 256, bias=False)
    ).to(torch.bfloat16)


def bytes_of_tensors(folder):
    """What the files hold beside their headers, and the headers."""
    data = heads = 0
    for path in folder.glob("*.safetensors"):
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        heads += 8 + length
        data += path.stat().st_size - 8 - length
    return data, heads


@pytest.mark.parametrize("layout", ["compressed-tensors", "ao_lab"])
@pytest.mark.parametrize(("scheme", "activation"), [entry[:2] for entry in FORMATS] + OURS)
def test_files_are_as_large_as_computed(tmp_path, scheme, activation, layout):
    """Codes, scales and zero points of the quantized layer, and the dense tensors; no byte more but headers."""
    model = little()
    config = SchemeConfig(scheme=scheme, activation_scheme=activation)
    computed = model_size(model, config, lambda module, name: name == "1")
    quantize_(model, config, lambda module, name: name == "1")
    try:
        saved = save_pretrained(model, tmp_path, layout=layout, config=LLAMA)
    except ValueError:
        pytest.skip("compressed-tensors does not hold it")
    data, heads = bytes_of_tensors(tmp_path)
    recipe = Recipe(weight=named(scheme), activation=named(activation))
    weight = weight_size((48, 256), recipe, layout=layout)
    dense = (40 * 256 + 48 + 48 + 48 + 48 * 256) * 2
    assert data == weight.bytes + dense
    assert saved.bytes == data + heads
    # Before anything is written, too.
    assert written_as(model, layout) == Written(layout, data)
    if layout == "ao_lab":
        assert computed.bytes == data
        assert model_size(model).bytes == data


@given(
    name=st.sampled_from(sorted(SCHEMES)),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 3),
    layout=st.sampled_from(["ao_lab", "compressed-tensors"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_scheme_takes_what_is_computed(name, rows, blocks, layout, dtype):
    """Of any record and shape: the bytes of the tensors that are made. Of values by a seed with which scales are numbers of the
    dtype in no scheme by chance alone, as files would have them in it."""
    x = torch.randn(rows, 256 * blocks, generator=torch.Generator().manual_seed(22)).to(dtype)
    try:
        t = quantized(x, name)
        computed = weight_size(x.shape, name, layout=layout, dtype=dtype)
        parts = t.parts.values() if layout == "ao_lab" else with_own_scales(reading(t), t).tensors.values()
    except ValueError:
        return
    assert computed.bytes == sum(part.numel() * part.element_size() for part in parts if part is not None)


@pytest.mark.parametrize("empty", [False, True])
def test_two_bit_scales_of_float16_weights(tmp_path, empty):
    """Files hold float16 ones, and float32 ones where a block is zeros, whose scale is below float16; known before, too."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 48, bias=False)).half()
    if empty:
        with torch.no_grad():
            model[0].weight[3, 64:128] = 0
    quantize_(model, SchemeConfig(scheme="int2_g64"))
    assert model[0].weight.scale.dtype == torch.float32
    expected = written_as(model, "compressed-tensors")
    save_pretrained(model, tmp_path, layout="compressed-tensors", config=LLAMA)
    assert expected.bytes == bytes_of_tensors(tmp_path)[0]
    computed = weight_size((48, 256), "int2_g64", layout="compressed-tensors", dtype=torch.float16)
    assert expected.bytes - computed.bytes == 2 * 48 * 4 * empty


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_8B, dtype="bfloat16")).to(
            torch.bfloat16
        )


@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        ("int8wo", "int8_rowwise"),
        ("float8wo", "fp8_rowwise"),
        ("float8dq per-row", "fp8_rowwise"),
        ("float8dq per-tensor", "fp8_tensorwise"),
        # Scale and zero point in bfloat16, as the published row has them.
        ("int4wo-64", "torchao.int4_g64_tinygemm"),
    ],
)
def test_published_sizes(llama, method, scheme):
    """Within 1 percent, of linear weights with the head and without the embedding."""
    size = model_size(llama, SchemeConfig(scheme=scheme)).linear
    assert size.bytes / 1e9 == pytest.approx(PUBLISHED[method], rel=0.01)


@pytest.mark.parametrize(
    ("scheme", "scale", "zero"),
    [
        ("int4_g64_asymmetric", 4, 1),
        ("int4_g64_asymmetric_bf16", 2, 1),
        ("int4_g64_bf16", 2, 0),
        ("torchao.int4_g64_tinygemm", 2, 2),
    ],
)
def test_what_scales_and_zero_points_take(llama, scheme, scale, zero):
    """int4 in groups of 64: 4.34, 4.10, 3.99 and 4.22 GB."""
    size = model_size(llama, SchemeConfig(scheme=scheme)).linear
    assert size == Size(WEIGHTS // 2, GROUPS * scale, GROUPS * zero)


def test_dense_models_and_what_stays(llama):
    nothing = model_size(llama)
    assert nothing.linear.bytes / 1e9 == pytest.approx(PUBLISHED["bfloat16"], rel=0.01)
    assert nothing.linear == Size(2 * WEIGHTS)
    everything = [*llama.parameters(), *llama.buffers()]
    assert nothing.bytes == sum(t.numel() * t.element_size() for t in everything)
    some = model_size(llama, FqnToConfig({r"re:.*mlp.*": SchemeConfig(scheme="mxfp4"), "lm_head": None}))
    assert {layer.scheme for layer in some.layers} == {"mxfp4", ""}
    static = Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.1))
    assert model_size(llama, static).linear == Size(WEIGHTS, ROWS * 4)


def test_shared_weights_count_once():
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    model[1].weight = model[0].weight
    size = model_size(model, SchemeConfig(scheme="int8_rowwise"), lambda module, name: True)
    assert size.bytes == 64 * 32 + 64 * 4
    assert len(size.layers) == 1


def test_what_has_no_size():
    with pytest.raises(ValueError, match="not divisible"):
        weight_size((4, 48), "int4_g32")
    with pytest.raises(ValueError, match="no format"):
        weight_size((4, 64), "nf4", layout="compressed-tensors")
    with pytest.raises(ValueError, match="layout is one of"):
        weight_size((4, 64), "nf4", layout="gguf")
    assert weight_size((4, 64), "mxfp4") == Size(4 * 32, 4 * 2)


def test_printed_a_size_is_a_line_a_scheme():
    """A model of thousands of layers is not thousands of characters."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)))
    quantize_(model, SchemeConfig(scheme="nvfp4"), lambda module, name: name not in ("", "0"))
    lines = str(model_size(model)).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "1 Linear, not quantized", "8 Linear, nvfp4", "other parameters and buffers", "whole model"
    ]  # fmt: skip
    assert lines[0].endswith("0.016 MB")
