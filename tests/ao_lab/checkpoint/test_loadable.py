"""Classes of transformers that cannot load packed or tied quantized layers: predicted where from_pretrained fails."""

import pytest
import torch
from torch import nn

from ao_lab import SchemeConfig, quantize_, save_pretrained
from ao_lab.checkpoint.plain_readers import unsupported_reasons

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DECODER = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip
T5 = {
    "vocab_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
SEEN = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    # Its vision tower is a model of transformers of its own, which initializes its layers.
    "Gemma3ForConditionalGeneration": lambda: transformers.Gemma3Config(
        text_config={**SEEN, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 32},
        vision_config={**SEEN, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(**T5),
    "FalconForCausalLM": lambda: transformers.FalconConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2
    ),
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**DECODER, tie_word_embeddings=True),
    "BertForMaskedLM": lambda: transformers.BertConfig(**DECODER),
}
#: (class, scheme, whether the head is quantized too): from_pretrained fails.
FAILS = {
    ("T5ForConditionalGeneration", "int8_rowwise_cast", True), ("T5ForConditionalGeneration", "int8_rowwise_cast", False),
    ("T5ForConditionalGeneration", "fp8_rowwise_cast", True),
    ("FalconForCausalLM", "int8_rowwise_cast", True), ("FalconForCausalLM", "int8_rowwise_cast", False),
    ("Gemma3ForConditionalGeneration", "int8_rowwise_cast", True),
    ("Gemma3ForConditionalGeneration", "int8_rowwise_cast", False),
}  # fmt: skip


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("scheme", ["int8_rowwise_cast", "fp8_rowwise_cast"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_predicted_happens(tmp_path, monkeypatch, name, scheme, head):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(MODELS[name]()).to(torch.bfloat16).eval()
    accepts = lambda m, path: isinstance(m, nn.Linear) and (head or "head" not in path)  # noqa: E731
    quantize_(model, SchemeConfig(scheme=scheme), accepts)
    fails = (name, scheme, head) in FAILS
    saved = save_pretrained(model, tmp_path / "auto")
    assert saved.layout == ("ao_lab" if fails else "compressed-tensors")
    assert any("from_pretrained fails in transformers" in reason for reason in saved.reasons) == fails
    monkeypatch.setattr("ao_lab.checkpoint.api.unsupported_reasons", lambda *arguments: [])
    save_pretrained(model, tmp_path / "plain", layout="compressed-tensors")
    if fails:
        with pytest.raises((AttributeError, RuntimeError)):
            kind.from_pretrained(tmp_path / "plain")
    else:
        kind.from_pretrained(tmp_path / "plain")


def test_other_models_are_not_asked():
    assert unsupported_reasons(nn.Sequential(nn.Linear(2, 2)), ["0"], ["0"], False) == []
