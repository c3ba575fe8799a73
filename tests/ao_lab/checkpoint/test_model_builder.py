"""What is saved of unusual models, and which model a folder is loaded into."""

import json

import pytest
import torch
from torch import nn

from ao_lab import (
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    QuantizedTensor,
    load_pretrained,
    quantize_,
    save_pretrained,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
X = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
TINY = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
TOKENS = torch.arange(12).reshape(2, 6)


def layers(*names, outputs=128):
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(128, outputs, bias=False) for name in names})


def llama(kind="LlamaForCausalLM", **more):
    torch.manual_seed(0)
    # Not .to(bfloat16): that rounds tables of positions, which no file holds.
    config = transformers.LlamaConfig(**TINY, **more)
    model = getattr(transformers, kind)._from_config(config, dtype=torch.bfloat16).eval()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def test_parts_in_common_are_not_one_weight(tmp_path):
    """The same codes read the other way round, or by another kernel, are other weights."""
    model = layers("a", "turned", "kernel")
    quantize_(model, Int8WeightOnlyConfig())
    weight = model["a"].weight.detach()
    model["turned"].weight = nn.Parameter(weight.t(), requires_grad=False)
    model["kernel"].weight = nn.Parameter(weight.with_recipe(kernel="reference"), requires_grad=False)
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path, layers("a", "turned", "kernel"))
    assert loaded["kernel"].weight.recipe.kernel == "reference"
    with torch.no_grad():
        for name in model:
            assert torch.equal(loaded[name](X), model[name](X))


def test_models_without_numbers_are_refused(tmp_path):
    with torch.device("meta"):
        model = layers("a")
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="on the meta device, without values"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_have_a_size(tmp_path):
    model = layers("a")
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="max_shard_bytes is at least 1"):
        save_pretrained(model, tmp_path, max_shard_bytes=0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "config", [Int8WeightOnlyConfig(), Int8StaticActivationInt8WeightConfig(act_quant_scale=1.0)]
)
def test_layers_without_rows(tmp_path, config):
    model, other = (nn.Sequential(nn.Linear(128, 64), nn.Linear(128, 0)) for _ in range(2))
    quantize_(model, config)
    save_pretrained(model, tmp_path)
    load_pretrained(tmp_path, other)
    with torch.no_grad():
        assert torch.equal(other[0](X), model[0](X))
        assert other[1](X).shape == (4, 0)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaModel", {}),
        ("LlamaForSequenceClassification", {"pad_token_id": 0, "num_labels": 3}),
        ("LlamaForTokenClassification", {"num_labels": 5}),
    ],
)
def test_the_class_that_was_saved_is_built(tmp_path, kind, more):
    model = llama(kind, **more)
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path)
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS)[0], model(TOKENS)[0])


def test_one_row_has_the_sums_of_plain_transformers_by_its_kernel(tmp_path):
    """A pooler sees one row of a single text, for which a CPU has a kernel of ours; transformers dequantizes."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name == "bert.pooler.dense")
    save_pretrained(model, tmp_path, layout="compressed-tensors")
    loaded, plain = load_pretrained(tmp_path), type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        for rows in (TOKENS, TOKENS[:1]):
            assert torch.equal(loaded(rows).logits, model(rows).logits)
        weight = loaded.bert.pooler.dense.weight.with_recipe(kernel="dequantize")
        loaded.bert.pooler.dense.weight = nn.Parameter(weight, requires_grad=False)
        assert torch.equal(loaded(TOKENS[:1]).logits, plain(TOKENS[:1]).logits)


@pytest.mark.parametrize(
    "architectures", [None, [], [3], ["pipeline"], ["AutoConfig"], ["NoSuchModel"], "LlamaModel", {"a": 1}]
)
def test_other_names_give_a_language_model(tmp_path, architectures):
    """Only models of transformers are classes that a file may name."""
    save_pretrained(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    assert type(load_pretrained(tmp_path)) is transformers.LlamaForCausalLM


def test_the_class_of_another_configuration_is_an_error(tmp_path):
    save_pretrained(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    with pytest.raises(ValueError, match="give"):
        load_pretrained(tmp_path)


def test_dtypes_are_said_and_can_be_chosen(tmp_path):
    model = llama()
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    same, wide = load_pretrained(tmp_path), load_pretrained(tmp_path, dtype=torch.float32)
    assert {value.dtype for value in same.state_dict().values()} == {torch.bfloat16}
    assert {value.dtype for value in wide.state_dict().values()} == {torch.float32}
    for name, parameter in wide.named_parameters():
        ours = same.get_parameter(name)
        if isinstance(parameter, QuantizedTensor):
            assert torch.equal(parameter.codes, ours.codes)
        assert torch.equal(parameter.to(torch.bfloat16), ours)
    model.float()
    with torch.no_grad():
        assert torch.equal(wide(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-38])
def test_weights_of_any_size_come_back(tmp_path, size):
    model = layers("a")
    with torch.no_grad():
        model["a"].weight.mul_(size)
    quantize_(model, NVFP4WeightOnlyConfig())
    save_pretrained(model, tmp_path)
    assert torch.equal(load_pretrained(tmp_path, layers("a"))["a"].weight, model["a"].weight)
