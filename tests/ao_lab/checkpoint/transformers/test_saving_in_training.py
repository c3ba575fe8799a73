"""`save_pretrained` of transformers' models in training: shared state once, adapters, and what a later prepare says."""

import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ao_lab
from ao_lab import (
    IntxWeightOnlyConfig,
    LoRA,
    QATConfig,
    SparseTrainingConfig,
    lora_state_dict,
    quantize_,
    sparsify_,
)
from ao_lab.transforms.report import names_in
from tests.ao_lab.quantization.test_models import transformers
from tests.support.models.hf_models import dense_model, everything

INT8 = IntxWeightOnlyConfig("int8")


def tied(**options):
    model, _ = dense_model("LlamaForCausalLM", tie_word_embeddings=True)
    quantize_(model, QATConfig(INT8, **options), everything)
    return model


@pytest.mark.parametrize("options", [{"learn_scales": True}, {"start_step": 1}])
def test_tied_layers_write_their_state_once(options, tmp_path):
    """As the tied weight is; loaded into a model that is prepared in the same way it is what it was."""
    model = tied(**options)
    for name, value in model.state_dict().items():
        if name.endswith(("qat_scale", "qat_step")):
            value.copy_(2 * value + 1)
    with pytest.warns(
        UserWarning, match=r"from_pretrained leaves qat_(scale|step) out: load model.safetensors"
    ):
        model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        state = [name for name in file.keys() if "qat_" in name]  # noqa: SIM118
    assert [name for name in state if name.startswith("lm_head")] == []
    assert "model.embed_tokens.qat_scale" in state or "model.embed_tokens.qat_step" in state
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"tensors of an earlier training .*embed_tokens.* starts them anew.*load_state"
    ):
        quantize_(read, QATConfig(INT8, **options), everything)
    read.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


def test_sparse_layers_say_what_is_left_out(tmp_path):
    model, _ = dense_model("LlamaForCausalLM")
    config = SparseTrainingConfig(masks="recomputed", every=100)
    sparsify_(model, config)
    with pytest.warns(
        UserWarning, match="train sparse, .* from_pretrained leaves sparse_mask, sparse_step out"
    ):
        model.save_pretrained(tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="tensors of an earlier training .* sparsify_ starts them anew"):
        sparsify_(read, config)
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_(other, SparseTrainingConfig())  # its masks are found from what was loaded


def test_adapters_and_the_weights_beside_them(tmp_path):
    """The folder has both; plain readers get the quantized model, prepared ones the adapters too."""
    model, _ = dense_model("LlamaForCausalLM")
    quantize_(model, QATConfig(INT8, lora=LoRA(rank=2, dtype=torch.float32)))
    for part in lora_state_dict(model).values():
        part.add_(0.01)
    kind = type(model.lm_head)
    with pytest.warns(
        UserWarning, match=r"adapters in training.*from_pretrained leaves them out.*lora_state_dict"
    ):
        model.save_pretrained(tmp_path)
    assert type(model.lm_head) is kind
    assert {"lm_head.lora_a", "lm_head.weight.codes"} <= set(names_in(tmp_path / "ao_lab.safetensors"))
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(base.lm_head.weight.codes, model.lm_head.weight.codes)
    with pytest.raises(ValueError, match=r"lm_head\.lora_a.*which the model lacks"):
        ao_lab.load_pretrained(tmp_path)


def test_headers_that_are_none_have_no_names(tmp_path):
    for content in (b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"{]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert list(names_in(tmp_path / "model.safetensors")) == []
