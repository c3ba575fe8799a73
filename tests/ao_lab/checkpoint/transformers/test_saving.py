"""transformers' own `model.save_pretrained` of quantized models: a folder that reads back bit for bit, or one clear error."""

import copy
import json

import pytest
import torch

from ao_lab import (
    HfConfig,
    Int8WeightOnlyConfig,
    LoRA,
    QATConfig,
    QuantizedTensor,
    load_pretrained,
    quantize_,
    quantize_pretrained,
)
from ao_lab.checkpoint.transformers.methods import bytes_of

transformers = pytest.importorskip("transformers")
from tests.support.models.hf_models import KINDS, assert_same_weights, dense_model, outputs, quantized_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers.utils.logging.disable_progress_bar()
INT8 = Int8WeightOnlyConfig()
INPUTS = {"input_ids": torch.arange(6)[None]}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_quantize(kind, tmp_path):
    """Read by transformers, by ao_lab, saved again in shards and read again."""
    model, _ = quantized_model(kind, "int4_g32_asymmetric")
    model.save_pretrained(tmp_path)
    read = getattr(transformers, kind).from_pretrained(tmp_path)
    assert_same_weights(model, read)
    assert_same_weights(read, load_pretrained(tmp_path))
    read.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_weights(model, getattr(transformers, kind).from_pretrained(tmp_path))
    assert (tmp_path / "generation_config.json").is_file() == model.can_generate()
    assert not list(tmp_path.glob("model*"))


def test_models_of_every_origin(tmp_path):
    """quantize_, quantize_pretrained, HfConfig, copies and models that were loaded: the same folder, and ordinary models."""
    dense_model("LlamaForCausalLM")[0].save_pretrained(tmp_path / "dense")
    auto = transformers.AutoModelForCausalLM
    first = auto.from_pretrained(tmp_path / "dense")
    quantize_(first, INT8)
    second = quantize_pretrained(tmp_path / "dense", INT8)
    third = auto.from_pretrained(tmp_path / "dense", quantization_config=HfConfig(INT8))
    assert [getattr(m, "is_quantized", False) for m in (first, second, third)] == [False, False, True]
    for number, model in enumerate((first, second, third, copy.deepcopy(third), load_pretrained)):
        folder = tmp_path / str(number)
        model = load_pretrained(tmp_path / "0") if model is load_pretrained else model
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        assert config["quantization_config"] == {
            "quant_method": "ao_lab",
            "version": 1,
            "weights": "ao_lab.safetensors",
        }
        assert_same_weights(first, auto.from_pretrained(folder))


def test_dense_models_are_saved_as_ever(tmp_path):
    model, _ = dense_model("LlamaForCausalLM")
    model.save_pretrained(tmp_path, variant="other")
    assert (tmp_path / "model.other.safetensors").is_file()
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path, variant="other")
    assert torch.equal(outputs(model, INPUTS), outputs(read, INPUTS))
    quantized, _ = quantized_model("LlamaForCausalLM", "nf4")
    quantized.save_pretrained(tmp_path / "quantized")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "quantized")
    read.dequantize()
    read.save_pretrained(tmp_path / "dense")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense")
    assert not any(isinstance(p, QuantizedTensor) for p in again.parameters())
    assert torch.equal(outputs(read, INPUTS), outputs(again, INPUTS))
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


@pytest.mark.parametrize("lora", [None, LoRA(rank=4, rounds="sum")])
def test_models_in_training_are_saved_dense_with_a_warning(lora, tmp_path):
    """Checkpoints of Trainer: the training weights; the converted model is saved quantized and without a warning."""
    model, _ = dense_model("LlamaForCausalLM")
    quantize_(model, QATConfig(INT8, step="prepare", lora=lora))
    told = (
        r"model\.layers\.0.*dense training weights, without the rounding: prepare .* again .*step='convert'"
    )
    with pytest.warns(UserWarning, match=told) as warned:
        model.save_pretrained(tmp_path / "checkpoint")
    assert len([one for one in warned if one.category is UserWarning]) == 1
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()
    quantize_(model, QATConfig(INT8, step="convert"))
    model.save_pretrained(tmp_path / "converted")
    assert_same_weights(model, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "converted"))


@pytest.mark.parametrize(
    "given", [{"variant": "a"}, {"state_dict": {}}, {"push_to_hub": True}, {"distributed_checkpoint": True}]
)
def test_other_formats_are_refused(given, tmp_path):
    """Before anything is written."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    with pytest.raises(
        ValueError, match=rf"{next(iter(given))}= does not go with .* ao_lab\.save_pretrained"
    ):
        model.save_pretrained(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
    model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out").exists()


def test_push_to_hub_saves_the_same_way(tmp_path, monkeypatch):
    """`model.push_to_hub(name)` saves into a folder of its own and uploads what is there."""
    import transformers.utils.hub as hub

    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    uploaded = []

    def upload(self, folder, *args, **kwargs):
        uploaded.append(load_pretrained(folder))

    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    monkeypatch.setattr(
        hub, "create_and_tag_model_card", lambda *a, **k: type("Card", (), {"save": lambda s, p: None})()
    )
    api = type("Api", (), {"create_repo": lambda self, name, **k: type("Url", (), {"repo_id": name})()})
    monkeypatch.setattr(hub, "hf_api", api)
    model.push_to_hub("owner/little")
    assert_same_weights(model, uploaded[0])


def test_sizes():
    assert [bytes_of(x) for x in (7, "7", "5GB", "1.5kb", "2MiB")] == [7, 7, 5 * 10**9, 1500, 2**21]
    with pytest.raises(ValueError, match="such as '5GB'"):
        bytes_of("a lot")


@pytest.mark.parametrize("how", ["HfConfig", "quantize_"])
def test_trainer(how, tmp_path):
    """Quantized weights are frozen, what is dense trains, and the checkpoint is a folder that reads back."""
    pytest.importorskip("accelerate", reason="Trainer needs it")
    dense_model("LlamaForCausalLM")[0].save_pretrained(tmp_path / "dense")
    given = {"quantization_config": HfConfig(INT8)} if how == "HfConfig" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **given)
    if not given:
        quantize_(model, INT8)
    codes = model.model.layers[0].mlp.up_proj.weight.codes.clone()
    table = model.model.embed_tokens.weight.detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert not torch.equal(table, model.model.embed_tokens.weight)
    assert torch.equal(codes, model.model.layers[0].mlp.up_proj.weight.codes)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert_same_weights(model, read)
    assert read.generate(INPUTS["input_ids"], max_new_tokens=2).shape == (1, 8)


def test_the_models_own_state(tmp_path):
    """`save_pretrained(..., state_dict=accelerator.get_state_dict(model))` is what training scripts write."""
    model, _ = quantized_model("LlamaForCausalLM", "int4_g32")
    model.save_pretrained(tmp_path, state_dict=model.state_dict(), is_main_process=True)
    assert_same_weights(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"state_dict= does not go with .* unless it is model.state_dict\(\)"
    ):
        model.save_pretrained(tmp_path, state_dict=copied)
