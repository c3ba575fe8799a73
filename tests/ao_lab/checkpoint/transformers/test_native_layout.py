"""Folders in our layout read by transformers: the model of `load_pretrained`, bit for bit, or an error."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from ao_lab import (
    Int8StaticActivationInt8WeightConfig,
    QuantizedTensor,
    SchemeConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from ao_lab.checkpoint.configuration import REFUSAL
from ao_lab.checkpoint.transformers import quantizer

transformers = pytest.importorskip("transformers")
from tests.support.models.hf_models import (  # noqa: E402
    KINDS,
    assert_same_weights,
    dense_model,
    everything,
    outputs,
    quantized_model,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers.utils.logging.disable_progress_bar()
SCHEMES = [
    ("nf4", None), ("int4_g32_asymmetric", None), ("mxfp4", None), ("nvfp4", None), ("fp8_rowwise", None),
    ("int8_rowwise", "int8_rowwise"),
]  # fmt: skip


def read(kind, folder, **given):
    """By transformers' own class; every weight was found, and no tensor was left over."""
    model, told = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **given)
    assert {name: found for name, found in told.items() if found} == {}
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture(kind, tmp_path):
    """One file, and shards that cut weights into files."""
    for scheme, limit in (("nf4", 10**9), ("int4_g32_asymmetric", 50_000)):
        model, inputs = quantized_model(kind, scheme)
        saved = save_pretrained(model, tmp_path, layout="ao_lab", max_shard_bytes=limit)
        assert (len(saved.files) > 4) == (limit < 10**9)
        loaded = read(kind, tmp_path)
        assert_same_weights(load_pretrained(tmp_path), loaded)
        assert torch.equal(outputs(load_pretrained(tmp_path), inputs), outputs(loaded, inputs))
        assert any(isinstance(p, QuantizedTensor) for p in loaded.parameters())
        assert loaded.is_quantized
        assert not hasattr(loaded.config, "transformers_weights")


@pytest.mark.parametrize(("scheme", "activation"), SCHEMES)
def test_every_scheme(scheme, activation, tmp_path):
    """Tables too, in bfloat16: the model that was saved, its outputs and what it generates."""
    model, inputs = quantized_model("LlamaForCausalLM", scheme, activation, everything, dtype=torch.bfloat16)
    save_pretrained(model, tmp_path, layout="ao_lab")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(model, loaded)
    assert torch.equal(outputs(model, inputs), outputs(loaded, inputs))
    generated = [m.generate(**inputs, max_new_tokens=3, do_sample=False) for m in (model, loaded)]
    assert torch.equal(*generated)


def test_tied_embeddings(tmp_path):
    model, inputs = quantized_model(
        "LlamaForCausalLM", "int8_rowwise", None, everything, tie_word_embeddings=True
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_pretrained(model, tmp_path, layout="ao_lab")
    loaded = read("LlamaForCausalLM", tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_weights(model, loaded)
    assert torch.equal(outputs(model, inputs), outputs(loaded, inputs))


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM"])
def test_heads_that_were_tied(kind, tmp_path, caplog):
    """The head is quantized, the table is not: transformers neither joins them again nor warns of it."""
    model, inputs = quantized_model(kind, "nf4", tie_word_embeddings=True)
    save_pretrained(model, tmp_path, layout="ao_lab")
    with caplog.at_level("WARNING", "transformers"):
        loaded = read(kind, tmp_path)
    assert "NOT tie" not in caplog.text
    assert_same_weights(model, loaded)
    assert torch.equal(outputs(model, inputs), outputs(loaded, inputs))


def test_weights_that_the_configuration_does_not_tie(tmp_path):
    """What modules share is in the records; transformers alone would know nothing of it."""
    model, inputs = dense_model("LlamaForCausalLM", num_hidden_layers=2)
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    second.input_layernorm.weight = first.input_layernorm.weight
    quantize_(model, SchemeConfig(scheme="nf4"))
    save_pretrained(model, tmp_path, layout="ao_lab")
    loaded = read("LlamaForCausalLM", tmp_path)
    assert_same_weights(model, loaded)
    assert torch.equal(outputs(model, inputs), outputs(loaded, inputs))


def test_static_scales(tmp_path):
    model, inputs = dense_model("LlamaForCausalLM")
    quantize_(model, Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05)))
    save_pretrained(model, tmp_path, layout="ao_lab")
    loaded = read("LlamaForCausalLM", tmp_path)
    assert_same_weights(model, loaded)
    assert torch.equal(outputs(model, inputs), outputs(loaded, inputs))


def test_dtypes(tmp_path):
    """The dtype that is asked for is what weights compute in, as with `load_pretrained`; codes and scales stay."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    save_pretrained(model, tmp_path, layout="ao_lab")
    for given, dtype in (({}, None), ({"dtype": "auto"}, None), ({"dtype": torch.bfloat16}, torch.bfloat16)):
        assert_same_weights(
            load_pretrained(tmp_path, dtype=dtype), read("LlamaForCausalLM", tmp_path, **given)
        )


def test_device_maps(tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs it for device_map")
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    save_pretrained(model, tmp_path, layout="ao_lab")
    for device_map in ("cpu", "auto", {"": "cpu"}):
        assert_same_weights(model, read("LlamaForCausalLM", tmp_path, device_map=device_map))
    for given in ({"device_map": {"": "disk"}}, {"device_map": "auto", "max_memory": {"cpu": 10_000}}):
        with pytest.raises(
            ValueError, match=r"the whole model on disk, .* without 'disk', or max_memory with more"
        ):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, offload_folder=tmp_path, **given)


def test_other_heads(tmp_path):
    """A trunk alone, and a trunk under a new head: quantized weights are those of the folder, new ones are new."""
    model, inputs = quantized_model("LlamaForCausalLM", "nf4")
    save_pretrained(model, tmp_path, layout="ao_lab")
    trunk = transformers.AutoModel.from_pretrained(tmp_path)
    assert_same_weights(model.model, trunk)
    assert torch.equal(outputs(model.model, inputs), outputs(trunk, inputs))
    scored, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert told["missing_keys"] == {"score.weight"}
    assert_same_weights(model.model, scored.model)
    save_pretrained(trunk, tmp_path, layout="ao_lab")
    whole, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert told["missing_keys"] == {"lm_head.weight"}
    assert_same_weights(trunk, whole.model)


def test_folders_of_earlier_versions(tmp_path):
    """There the files are called as transformers expects, and config.json names none."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    save_pretrained(model, tmp_path, layout="ao_lab")
    (tmp_path / "ao_lab.safetensors").rename(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("transformers_weights") == REFUSAL
    assert config["quantization_config"].pop("weights") == "ao_lab.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_weights(model, read("LlamaForCausalLM", tmp_path))
    assert_same_weights(model, load_pretrained(tmp_path))


def changed(folder, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        place = config["quantization_config"] if name in ("version", "weights") else config
        place[name] = value
    path.write_text(json.dumps(config))


def test_damaged_folders(tmp_path, monkeypatch):
    """The checks of `load_pretrained`, before a tensor is read."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    load = transformers.AutoModelForCausalLM.from_pretrained
    cases = [
        ({"version": 7}, "install another ao_lab"), ({"weights": "../other.safetensors"}, "weights is ao_lab.safetensors"),
        ({"intermediate_size": 128}, "has shape"),
    ]  # fmt: skip
    for fields, message in cases:
        save_pretrained(model, tmp_path, layout="ao_lab")
        changed(tmp_path, **fields)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    save_pretrained(model, tmp_path, layout="ao_lab")
    file = tmp_path / "ao_lab.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut off"):
        load(tmp_path)
    file.write_bytes(whole.replace(b'"axis', b'"oxis', 1).replace(b'\\"axis', b'\\"oxis', 1))
    with pytest.raises(ValueError, match="fetch or write the folder again"):
        load(tmp_path)
    file.write_bytes(whole)

    def refuses(tensor):
        raise ValueError("numbers that do not fit")

    monkeypatch.setattr(quantizer, "check_quantized_tensor", refuses)
    with pytest.raises(ValueError, match=r"weight .* of .*: numbers that do not fit; fetch or write"):
        load(tmp_path)


def test_weights_of_another_folder_are_refused(tmp_path):
    """An index may name any path, and transformers follows it."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        save_pretrained(model, folder, layout="ao_lab", max_shard_bytes=50_000)
    index = folders[0] / "ao_lab.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {name: f"../other/{file}" for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="outside of the folder; fetch the folder again"):
        read("LlamaForCausalLM", folders[0])


def test_both_kinds_of_files(tmp_path):
    """Where a dense model has been saved over a quantized one, nobody guesses which weights are meant."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    save_pretrained(model, tmp_path, layout="ao_lab")
    dense_model("LlamaForCausalLM")[0].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="remove those that are stale"):
        load_pretrained(tmp_path)
    save_pretrained(quantized_model("LlamaForCausalLM", "mxfp4")[0], tmp_path, layout="compressed-tensors")
    assert not list(tmp_path.glob("ao_lab*"))
    assert "transformers_weights" not in json.loads((tmp_path / "config.json").read_text())


ORDERS = {
    "ao_lab first": "import ao_lab, transformers",
    "transformers first": "import transformers, ao_lab",
    "its reader first": "from transformers import AutoModelForCausalLM, PreTrainedModel\nimport ao_lab, transformers",
}


@pytest.mark.parametrize(
    "order", [next(iter(ORDERS)), *(pytest.param(one, marks=pytest.mark.nightly) for one in [*ORDERS][1:])]
)
def test_either_order_of_imports(order, tmp_path):
    """Neither library imports the other, and the module that is waited for keeps its own loader."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    save_pretrained(model, tmp_path, layout="ao_lab")
    script = f"""
import sys
{ORDERS[order]}
assert "torch" not in sys.modules or "ao_lab first" != {order!r}
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
module = sys.modules["transformers.modeling_utils"]
assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
assert len([f for f in sys.meta_path if "transformers_hook" in type(f).__module__]) == 1  # peft is waited for
print(type(model.model.layers[0].mlp.up_proj.weight).__name__)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["QuantizedTensor"], done.stderr[-2000:]


def test_a_layer_of_ones_own(tmp_path):
    """Outside of transformers' models nothing changes: no sentence in config.json, `load_pretrained` with a model."""
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, SchemeConfig(scheme="nf4"))
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "quantization_config": {"quant_method": "ao_lab", "version": 1, "weights": "ao_lab.safetensors"}
    }
    assert_same_weights(model, load_pretrained(tmp_path, nn.Sequential(nn.Linear(64, 64))))
