"""Layers whose inputs have two axes: transformers finds one scale for all their tokens, so their export is refused."""

import pytest
import torch
from torch import nn

from ao_lab import Int8DynamicActivationInt8WeightConfig, quantize_, save_pretrained
from ao_lab.checkpoint.export.input_rank import flat_inputs
from tests.ao_lab.quantization.test_models_transformers import MODELS

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
CONFIG = Int8DynamicActivationInt8WeightConfig().for_layout("compressed-tensors")
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def opt():
    torch.manual_seed(0)
    config = transformers.OPTConfig(**SIZES, ffn_dim=128, max_position_embeddings=32, word_embed_proj_dim=64)
    return transformers.OPTForCausalLM(config)


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, intermediate_size=128, max_position_embeddings=32)
    return transformers.BertForSequenceClassification(config)


def linears(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(
    ("make", "flat"),
    [(opt, ["fc1", "fc2"]), (classifier, ["bert.pooler.dense", "classifier"])],
)
def test_flat_layers_are_found_and_refused(make, flat, tmp_path):
    model = make().train()
    inner = [name for name in linears(model) if name != "lm_head"]
    found, unseen = flat_inputs(model, inner)
    assert [name.rsplit(".", 1)[-1] if make is opt else name for name in found] == flat
    assert unseen == []
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    quantize_(model, CONFIG, lambda module, name: name in inner)
    with pytest.raises(ValueError, match=r"its inputs have two axes.*PerTensor"):
        save_pretrained(model, tmp_path / "a", layout="compressed-tensors")
    with pytest.warns(UserWarning, match="two axes"):
        assert save_pretrained(model, tmp_path / "b").layout == "ao_lab"
    kept = make()
    quantize_(kept, CONFIG, lambda module, name: name in inner and name not in found)
    assert save_pretrained(kept, tmp_path / "c").layout == "compressed-tensors"


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "WhisperForConditionalGeneration", "ViTForImageClassification"]
)
def test_models_of_other_inputs_are_reached(name):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name][0]))
    _, unseen = flat_inputs(model, linears(model))
    assert unseen == []


def test_models_of_ones_own_are_not_run():
    assert flat_inputs(nn.Sequential(nn.Linear(4, 4)), ["0"]) is None
