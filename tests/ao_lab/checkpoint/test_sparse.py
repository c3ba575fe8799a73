"""2:4 storage in files: the same parts again, what is broken refused, and no reader misled."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ao_lab import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    QuantizedTensor,
    SchemeConfig,
    SparseQuantizedTensor,
    SparsityConfig,
    explain,
    load_pretrained,
    quantize_,
    save_pretrained,
    sparsify_,
)

CONFIGS = {
    "int8": Int8DynamicActivationInt8WeightConfig(sparsity="2:4"),
    "int4": SchemeConfig(scheme="int4_g32", sparsity="2:4"),
    "int4 asymmetric": SchemeConfig(scheme="int4_g32_asymmetric", sparsity="2:4"),
    "fp8": SchemeConfig(scheme="fp8_rowwise", sparsity="2:4"),
    "nvfp4": SchemeConfig(scheme="nvfp4", sparsity="2:4"),
    "elements": None,
}


def model(name=None):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(torch.bfloat16)
    if name is None:
        return made
    config = CONFIGS[name]
    sparsify_(made, SparsityConfig(storage="compressed" if config is None else "dense"))
    if config is not None:
        quantize_(made, config)
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_parts_again(name, tmp_path):
    made = model(name)
    saved = save_pretrained(made, tmp_path, layout="ao_lab")
    assert saved.layout == "ao_lab"
    found = load_pretrained(tmp_path, model())
    for a, b in zip(made.parameters(), found.parameters(), strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b)
    layer = explain(found).layers[0]
    assert (layer.sparsity, layer.storage) == ("2:4", "compressed")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(made(x), found(x))


def test_transposed_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layers = [nn.Sequential(transformers.pytorch_utils.Conv1D(32, 64)) for _ in range(2)]
    nn.init.normal_(layers[0][0].weight)
    sparsify_(layers[0], SparsityConfig())
    quantize_(layers[0], Int8WeightOnlyConfig(sparsity="2:4"))
    save_pretrained(layers[0], tmp_path, layout="ao_lab")
    found = load_pretrained(tmp_path, layers[1])
    assert torch.equal(found[0].weight, layers[0][0].weight)


def test_plain_readers_get_nothing_that_they_would_misread(tmp_path):
    made = model("int8")
    with pytest.raises(
        ValueError, match=r"compressed-tensors 0\.20 cannot load 2:4 storage.*sparse-24-bitmask"
    ):
        save_pretrained(made, tmp_path, layout="compressed-tensors")
    with pytest.warns(UserWarning, match="cannot load 2:4 storage"):
        assert save_pretrained(made, tmp_path).layout == "ao_lab"


def broken(tmp_path, change=None, record=None):
    """A saved folder, one of its tensors or its records changed."""
    save_pretrained(model("int8"), tmp_path, layout="ao_lab")
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    if change is not None:
        change(tensors)
    records = json.loads(metadata["ao_lab"])
    if record is not None:
        record(records)
    save_file(tensors, file, {**metadata, "ao_lab": json.dumps(records)})
    return tmp_path


def without_metadata(tensors):
    del tensors["0.weight.metadata"]


def of_another_shape(tensors):
    tensors["0.weight.codes"] = tensors["0.weight.codes"][:, :16].contiguous()


def naming_nothing(tensors):
    tensors["0.weight.metadata"] = torch.zeros_like(tensors["0.weight.metadata"])


def dense_layout(records):
    records["recipes"][0]["layout"] = "plain"


def another_name(records):
    records["recipes"][0]["weight"]["name"] = "int8_rowwise"


def another_axis(records):
    records["recipes"][0]["axis"] = -2
    records["recipes"][0]["transposed"] = True


@pytest.mark.parametrize(
    ("change", "record", "message"),
    [
        (without_metadata, None, "lacks tensor .*metadata"),
        (of_another_shape, None, "0.weight.codes"),
        (naming_nothing, None, "name no two places"),
        (None, dense_layout, "parts are|codes"),
        (None, another_name, "is called int8_rowwise_2:4"),
        (None, another_axis, "2:4 storage holds matrices"),
    ],
)
def test_broken_folders(tmp_path, change, record, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(broken(tmp_path, change, record), model())


def test_folders_of_dense_weights_are_what_they_were(tmp_path):
    made = model()
    quantize_(made, Int8WeightOnlyConfig())
    save_pretrained(made, tmp_path, layout="ao_lab")
    (file,) = tmp_path.glob("*.safetensors")
    assert not any(name.endswith("metadata") for name in load_file(file))
    assert type(load_pretrained(tmp_path, model())[0].weight) is QuantizedTensor
    assert not isinstance(made[0].weight, SparseQuantizedTensor)


def test_transformers_reads_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    sparsify_(made, SparsityConfig())
    quantize_(
        made,
        Int8WeightOnlyConfig(sparsity="2:4"),
        lambda module, path: "layers" in path and isinstance(module, nn.Linear),
    )
    save_pretrained(made, tmp_path, layout="ao_lab")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(found.named_parameters(), made.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    with torch.no_grad():
        assert found(torch.arange(6)[None]).logits.isfinite().all()
    assert isinstance(found.model.layers[0].mlp.up_proj.weight, SparseQuantizedTensor)
